// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/quantized/quantization_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/regex.h"

namespace eadem::io {

namespace {

using Layout = QuantizationScheme::Layout;
using Scope = QuantizationScheme::Scope;

std::string lower(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

bool is_empty(const JsonValue& value) {
  return value.is_null() || (value.is_object() && value.as_object().empty()) ||
         (value.is_array() && value.as_array().empty());
}

[[noreturn]] void refuse(const JsonReader& place, std::string_view key, const std::string& value,
                         std::string_view what_is_read) {
  throw Unsupported("{}: {} is {}; {}", place.file(), quote(key), value, what_is_read);
}

// Keys that change what the weights mean when they hold anything.
void require_empty(const JsonReader& json, std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys)
    if (const JsonValue* value = json.raw(key); value != nullptr && !is_empty(*value))
      refuse(json, key, quote(to_compact_json(*value)), "it is not honoured");
}

void require_false(const JsonReader& json, std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys)
    if (json.optional_boolean(key).value_or(false)) refuse(json, key, "true", "it is not honoured");
}

// Keys that do not change what the weights mean.
void ignore_all(const JsonReader& json, std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys)
    json.ignore(key, "says how the weights were made or how another program runs them");
}

void refuse_unread(const JsonReader& json, const std::string& method) {
  const std::vector<std::string> unread = json.unread_keys();
  if (unread.empty()) return;
  std::string names;
  for (const std::string& key : unread) names += (names.empty() ? "" : ", ") + quote(key);
  throw Unsupported("{}: {} of {} not honoured: {}", json.file(), unread.size() == 1 ? "a key" : "keys", method, names);
}

std::vector<std::string> optional_strings(const JsonReader& json, std::string_view key) {
  return json.has(key) ? json.strings(key) : (json.ignore(key), std::vector<std::string>{});
}

// Sets scope and group_size of integers; -1 is the whole row.
void set_group_size(QuantizationScheme& config, const JsonReader& json, int64_t size, std::string_view key) {
  config.scope = size == -1 ? Scope::row : Scope::group;
  if (size == -1) return;
  if (size != 32 && size != 64 && size != 128)
    refuse(json, key, std::to_string(size), "groups of 32, 64 and 128 columns are read, and whole rows (-1)");
  config.group_size = size;
}

void set_bits(QuantizationScheme& config, const JsonReader& json, std::string_view key,
              std::initializer_list<int64_t> known) {
  const int64_t bits = json.integer(key, 1, 64);
  if (std::find(known.begin(), known.end(), bits) == known.end())
    refuse(json, key, std::to_string(bits), fmt::format("{} reads {} bits", config.method, fmt::join(known, " and ")));
  config.bits = static_cast<int>(bits);
}

// ---- gptq

// Whether `meta` says that GPTQModel wrote the file: a text, or a list of them, as "gptqmodel:1.4.0".
bool is_of_gptqmodel(const JsonReader& json) {
  const JsonValue* const meta = json.value().find("meta");
  const JsonValue* const writer = meta != nullptr && meta->is_object() ? meta->find("quantizer") : nullptr;
  if (writer == nullptr) return false;
  const auto names_it = [](const JsonValue& text) {
    return text.is_string() && lower(text.as_string()).starts_with("gptqmodel");
  };
  if (!writer->is_array()) return names_it(*writer);
  return std::any_of(writer->as_array().begin(), writer->as_array().end(), names_it);
}

void read_gptq(QuantizationConfig& config, const JsonReader& json) {
  config.layout = Layout::gptq;
  set_bits(config, json, "bits", {4, 8});
  set_group_size(config, json, json.integer("group_size", -1), "group_size");
  config.has_zeros = !json.optional_boolean("sym").value_or(true);
  config.has_order = json.optional_boolean("desc_act").value_or(false);
  std::string format = "gptq";
  for (const char* key : {"checkpoint_format", "format"})
    if (const auto value = json.optional_string(key)) {
      format = lower(*value);
      if (format != "gptq" && format != "gptq_v2") refuse(json, key, quote(*value), "gptq and gptq_v2 are read");
    }
  config.zeros_less_one = format == "gptq";
  config.borrows_across_zeros = config.zeros_less_one && is_of_gptqmodel(json);
  if (const auto dtype = json.optional_string("pack_dtype"); dtype && *dtype != "int32")
    refuse(json, "pack_dtype", quote(*dtype), "int32 is read");
  // Settings for single layers: "-:pattern" leaves them as they are, which their tensors say.
  if (const auto dynamic = json.optional_object("dynamic")) {
    for (const std::string& pattern : dynamic->keys())
      if (!pattern.starts_with("-:"))
        refuse(json, "dynamic." + pattern, "there", "settings of single layers are not read");
    json.ignore("dynamic");
  }
  require_false(json, {"is_marlin_format"});
  require_empty(json, {"rotation", "adapter", "modules_to_convert"});
  config.ignored = optional_strings(json, "modules_to_not_convert");
  ignore_all(json, {"damp_percent",
                    "damp_auto_increment",
                    "true_sequential",
                    "static_groups",
                    "act_group_aware",
                    "mse",
                    "lm_head",
                    "model_name_or_path",
                    "model_file_base_name",
                    "dataset",
                    "tokenizer",
                    "block_name_to_quantize",
                    "module_name_preceding_first_block",
                    "modules_in_block_to_quantize",
                    "inside_layer_modules",
                    "batch_size",
                    "pad_token_id",
                    "disable_exllama",
                    "use_exllama",
                    "exllama_config",
                    "max_input_length",
                    "use_cuda_fp16",
                    "cache_block_outputs",
                    "model_seqlen",
                    "backend",
                    "meta"});
}

// ---- awq

void read_awq(QuantizationConfig& config, const JsonReader& json) {
  config.layout = Layout::awq;
  set_bits(config, json, json.has("w_bit") ? "w_bit" : "bits", {4});
  const std::string_view size_key = json.has("q_group_size") ? "q_group_size" : "group_size";
  set_group_size(config, json, json.integer(size_key, -1), size_key);
  config.has_zeros = json.optional_boolean("zero_point").value_or(true);
  if (!config.has_zeros) refuse(json, "zero_point", "false", "weights with zero points are read");
  for (const char* key : {"version", "format"})
    if (const auto version = json.optional_string(key); version && lower(*version) != "gemm")
      refuse(json, key, quote(*version), "the layout gemm is read");
  if (const auto backend = json.optional_string("backend"); backend && lower(*backend) == "llm-awq")
    refuse(json, "backend", quote(*backend), "its layout is not read; that of autoawq is");
  config.ignored = optional_strings(json, "modules_to_not_convert");
  ignore_all(json, {"do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"});
}

// ---- fp8

void set_blocks(QuantizationScheme& config, const JsonReader& json, std::string_view key) {
  const std::vector<int64_t> block = json.integers(key, 1, int64_t{1} << 31);
  if (block != std::vector<int64_t>{128, 128})
    refuse(json, key, fmt::format("[{}]", fmt::join(block, ", ")), "blocks of [128, 128] are read");
  config.scope = Scope::block;
}

void read_fp8(QuantizationConfig& config, const JsonReader& json) {
  config.layout = Layout::floats;
  config.bits = 8;
  config.scope = Scope::unstated;
  if (json.has("weight_block_size"))
    set_blocks(config, json, "weight_block_size");
  else
    json.ignore("weight_block_size");
  if (const auto kind = json.optional_string("fmt")) {
    if (*kind != "e4m3" && *kind != "e5m2") refuse(json, "fmt", quote(*kind), "e4m3 and e5m2 are read");
    config.floats = *kind == "e4m3" ? Fp8Format::Kind::e4m3 : Fp8Format::Kind::e5m2;
  }
  if (const auto scheme = json.optional_string("activation_scheme"); scheme && *scheme != "dynamic")
    refuse(json, "activation_scheme", quote(*scheme), "only \"dynamic\" is honoured");
  // The rounding of activation scales concerns only the program that quantizes activations.
  if (const auto rounding = json.optional_string("scale_fmt"); rounding && *rounding != "ue8m0" && *rounding != "float")
    refuse(json, "scale_fmt", quote(*rounding), "ue8m0 and float are known");
  for (const char* key : {"modules_to_not_convert", "ignored_layers"})
    for (std::string& layer : optional_strings(json, key)) config.ignored.push_back(std::move(layer));
  require_empty(json, {"modules_to_convert", "kv_cache_scheme", "kv_cache_quant_method"});
  ignore_all(json, {"dequantize"});
}

// A key of the whole config.json, or of its quantization_config: what experts are stored in.
void read_expert_dtype(QuantizationConfig& config, const JsonReader& json) {
  const auto dtype = json.optional_string("expert_dtype");
  if (!dtype) return;
  if (*dtype != "fp4" && *dtype != "fp8") refuse(json, "expert_dtype", quote(*dtype), "fp4 and fp8 are read");
  if (!config.expert_dtype.empty() && config.expert_dtype != *dtype)
    throw DataCorrupted("{}: 'expert_dtype' is {}; that of the config.json is {}", json.file(), quote(*dtype),
                        quote(config.expert_dtype));
  config.expert_dtype = *dtype;
}

// ---- mxfp4

void read_mxfp4(QuantizationConfig& config, const JsonReader& json) {
  config.layout = Layout::mxfp4;
  config.bits = 4;
  config.group_size = 32;
  config.ignored = optional_strings(json, "modules_to_not_convert");
  ignore_all(json, {"dequantize"});
}

// ---- compressed-tensors

// The `weights` of a scheme.
void read_weights(QuantizationScheme& config, const JsonReader& weights, const std::string& format) {
  if (weights.has("dynamic") && weights.raw("dynamic")->kind() != JsonValue::Kind::boolean)
    refuse(weights, "weights.dynamic", quote(to_compact_json(*weights.raw("dynamic"))), "only false is honoured");
  require_false(weights, {"dynamic"});
  const std::string type = weights.optional_string("type").value_or("int");
  if (type != "int" && type != "float") refuse(weights, "weights.type", quote(type), "int and float are read");
  const bool is_float = type == "float", is_packed = format == "pack-quantized";
  if ((is_packed || format == "int-quantized") == is_float && format != "naive-quantized")
    refuse(weights, "weights.type", quote(type), fmt::format("that is not what {} holds", format));
  config.layout = is_float ? Layout::floats : is_packed ? Layout::packed : Layout::integers;
  if (is_packed)
    set_bits(config, weights, "num_bits", {4, 8});
  else
    set_bits(config, weights, "num_bits", {8});
  if (is_float) config.floats = Fp8Format::Kind::e4m3;

  const bool symmetric = weights.optional_boolean("symmetric").value_or(true);
  if (is_float && !symmetric) refuse(weights, "weights.symmetric", "false", "floats have no zero points");
  config.has_zeros = !symmetric;

  const std::optional<int64_t> group_size = weights.optional_integer("group_size", -1);
  const std::string strategy = weights.optional_string("strategy")
                                   .value_or(!group_size         ? "tensor"
                                             : *group_size == -1 ? "channel"
                                                                 : "group");
  const bool has_blocks = weights.has("block_structure");
  if (strategy == "block" && is_float) {
    set_blocks(config, weights, "block_structure");
  } else if (strategy == "group" && !is_float) {
    if (!group_size) weights.fail("group_size", "an integer, which the strategy group needs");
    set_group_size(config, weights, *group_size, "weights.group_size");
  } else if (strategy == "channel") {
    config.scope = Scope::row;
  } else if (strategy == "tensor") {
    config.scope = Scope::tensor;
    if (config.has_zeros) refuse(weights, "weights.symmetric", "false", "zero points of a whole tensor are not read");
  } else {
    refuse(weights, "weights.strategy", quote(strategy),
           is_float ? "tensor, channel and block are read" : "tensor, channel and group are read");
  }
  if (has_blocks && strategy != "block")
    refuse(weights, "weights.block_structure", "there", fmt::format("the strategy is {}", strategy));
  weights.ignore("block_structure");

  if (const JsonValue* order = weights.raw("actorder"); order != nullptr && !order->is_null()) {
    const std::string value = order->is_string() ? lower(order->as_string()) : to_compact_json(*order);
    // "weight" and "static" order columns while quantizing only.
    if (value == "group" || value == "dynamic" || value == "true")
      config.has_order = true;
    else if (value != "weight" && value != "static" && value != "false")
      refuse(weights, "weights.actorder", quote(value), "group and weight are read");
  }
  ignore_all(weights, {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"});
}

void read_activations(const JsonReader& scheme) {
  require_empty(scheme, {"output_activations"});
  const std::optional<JsonReader> inputs = scheme.optional_object("input_activations");
  if (!inputs) return;
  const JsonValue* dynamic = inputs->raw("dynamic");
  if (dynamic == nullptr || !(*dynamic == JsonValue(true)))
    refuse(scheme, "input_activations.dynamic", dynamic == nullptr ? "missing" : quote(to_compact_json(*dynamic)),
           "activations with static scales are not honoured");
  scheme.ignore("input_activations", "saves time at run time; kernels here choose how they round activations");
}

bool is_format(std::string_view format) {
  return format == "pack-quantized" || format == "int-quantized" || format == "float-quantized" ||
         format == "naive-quantized";
}
constexpr std::string_view kFormats = "pack-quantized, int-quantized, float-quantized and naive-quantized are read";
constexpr std::string_view kPattern = "re:";

// The scheme of `config_groups.NAME`, of a config of that format. An error says which group it is.
QuantizationScheme read_group(const JsonReader& json, const JsonReader& group, const std::string& name,
                              const std::string& format) {
  QuantizationScheme scheme;
  scheme.place = json.file();
  const std::string own = group.optional_string("format").value_or(format);
  if (!is_format(own)) {
    const bool stated = group.has("format");
    refuse(json, stated ? "config_groups." + name + ".format" : "format", quote(own),
           fmt::format("{}{}", kFormats, stated ? "" : ", and of different schemes each states its own"));
  }
  scheme.method = "compressed-tensors " + own;
  try {
    read_weights(scheme, group.object("weights"), own);
    read_activations(group);
  } catch (const Unsupported& error) {
    throw Unsupported("{} (of 'config_groups.{}')", error.what(), name);
  }
  return scheme;
}

// The pattern that a target is; null for a name.
std::shared_ptr<const Regex> pattern_of(const JsonReader& json, const std::string& target) {
  if (!target.starts_with(kPattern)) return nullptr;
  try {
    return std::make_shared<const Regex>(target.substr(kPattern.size()), json.file() + ": a target of a scheme");
  } catch (const Unsupported&) {
    refuse(json, "targets", quote(target), "such a pattern is not read");
  }
}

// As pattern_of, but null for a pattern that cannot be read: the caller gets by without it.
std::shared_ptr<const Regex> readable_pattern_of(const JsonReader& json, const std::string& target) {
  try {
    return pattern_of(json, target);
  } catch (const Error&) {
    return nullptr;
  }
}

// The targets of the groups, in the order of match_targets(): names, then patterns, each sorted. Of two groups with the
// same target the later one has it.
std::vector<QuantizationConfig::Target> targets_of(const JsonReader& json, const JsonReader& groups,
                                                   const std::vector<size_t>& scheme_of_group, bool must_be_read) {
  std::map<std::pair<bool, std::string>, size_t> sorted;
  size_t index = 0;
  for (const std::string& name : groups.keys()) {
    const JsonReader group = groups.object(name);
    for (const std::string& target : must_be_read ? group.strings("targets") : optional_strings(group, "targets"))
      sorted[{target.find(kPattern) != std::string::npos, target}] = scheme_of_group[index];
    ++index;
  }
  std::vector<QuantizationConfig::Target> targets;
  for (const auto& [key, scheme] : sorted)
    targets.push_back(
        {key.second, must_be_read ? pattern_of(json, key.second) : readable_pattern_of(json, key.second), scheme});
  return targets;
}

void read_compressed_tensors(QuantizationConfig& config, const JsonReader& json) {
  const std::string format = json.optional_string("format").value_or("dense");
  if (!is_format(format) && format != "mixed-precision")
    refuse(json, "format", quote(format), fmt::format("{}, and mixed-precision of them", kFormats));
  config.method += " " + format;
  if (const auto status = json.optional_string("quantization_status");
      status && *status != "compressed" && *status != "frozen")
    refuse(json, "quantization_status", quote(*status), "compressed weights are read");

  // Groups may share a scheme. Where all do, the tensors say which layers have it, and targets are only for telling
  // which should.
  const JsonReader groups = json.object("config_groups");
  std::vector<QuantizationScheme> schemes;
  std::vector<std::string> first_groups;  // that have each scheme
  std::vector<size_t> scheme_of_group;
  for (const std::string& name : groups.keys()) {
    const JsonReader group = groups.object(name);
    QuantizationScheme scheme = read_group(json, group, name, format);
    const auto index = static_cast<size_t>(std::find(schemes.begin(), schemes.end(), scheme) - schemes.begin());
    scheme_of_group.push_back(index);
    if (index < schemes.size()) continue;
    schemes.push_back(std::move(scheme));
    first_groups.push_back(name);
  }
  if (schemes.empty()) json.fail("config_groups", "at least one scheme");
  if (schemes.size() == 1) {
    static_cast<QuantizationScheme&>(config) = schemes[0];
    config.targets = targets_of(json, groups, scheme_of_group, false);
  } else {
    config.targets = targets_of(json, groups, scheme_of_group, true);
    for (size_t i = 0; i < schemes.size(); ++i) {
      schemes[i].place += fmt::format(": 'config_groups.{}'", first_groups[i]);
      schemes[i].method += fmt::format(" as 'config_groups.{}' says", first_groups[i]);
    }
    config.schemes = std::move(schemes);
  }

  for (std::string& layer : optional_strings(json, "ignore")) {
    auto pattern = readable_pattern_of(json, layer);
    config.plain.push_back({std::move(layer), std::move(pattern)});
  }
  if (const auto sparsity = json.optional_object("sparsity_config")) {
    if (const auto kind = sparsity->optional_string("format"); kind && *kind != "dense")
      refuse(json, "sparsity_config.format", quote(*kind), "dense weights are read");
    json.ignore("sparsity_config");
  }
  require_empty(json, {"kv_cache_scheme", "transform_config", "moe_sparsity_config"});
  ignore_all(json, {"global_compression_ratio", "version"});
}

// The first of `targets` that is for the layer: one that matches its name, or else its class.
const QuantizationConfig::Target* find_target(const std::vector<QuantizationConfig::Target>& targets,
                                              std::string_view layer) {
  using Target = QuantizationConfig::Target;
  TextWork work(layer.size());
  const auto matches_name = [&](const Target& target) {
    if (target.pattern == nullptr) return target.text == layer;
    // A leftmost match begins at 0 if there is one that does.
    Regex::Scanner scanner(*target.pattern, work);
    scanner.scan(layer);
    size_t begin = 0, end = 0;
    return scanner.next(begin, end) && begin == 0;
  };
  const bool is_embedding = layer == "embed_tokens" || layer.ends_with(".embed_tokens");
  const auto matches_class = [&](const Target& target) {
    return target.text == (is_embedding ? "Embedding" : "Linear") || target.text == "Module";
  };
  auto found = std::find_if(targets.begin(), targets.end(), matches_name);
  if (found == targets.end()) found = std::find_if(targets.begin(), targets.end(), matches_class);
  return found == targets.end() ? nullptr : &*found;
}

// Whether `entry` is the name of the layer, of a module around it, or of its last part.
bool is_part_of(const std::string& entry, std::string_view layer) {
  return layer == entry || layer.starts_with(entry + ".") || layer.ends_with("." + entry);
}

struct Method {
  std::string_view name;
  void (*read)(QuantizationConfig& config, const JsonReader& json);
};
constexpr Method kMethods[] = {{"gptq", read_gptq},
                               {"awq", read_awq},
                               {"fp8", read_fp8},
                               {"mxfp4", read_mxfp4},
                               {"compressed-tensors", read_compressed_tensors}};

}  // namespace

std::optional<QuantizationConfig> QuantizationConfig::from_json(const JsonReader& config) {
  const bool has_new = config.has("quantization_config"), has_old = config.has("compression_config");
  config.ignore("quantization_config");
  config.ignore("compression_config");
  if (!has_new && !has_old) return std::nullopt;
  if (has_new && has_old)
    throw DataCorrupted("{}: both 'quantization_config' and 'compression_config' are there", config.file());
  const char* key = has_new ? "quantization_config" : "compression_config";
  // A document of its own, so that what nobody reads below here is known.
  const JsonValue* value = config.raw(key);
  if (!value->is_object()) config.fail(key, "an object");
  const JsonReader json = JsonReader::parse(to_compact_json(*value), fmt::format("{}: '{}'", config.file(), key));

  QuantizationConfig result;
  result.place = json.file();
  const JsonValue* const layers = config.value().find("num_hidden_layers");
  if (layers != nullptr && layers->kind() == JsonValue::Kind::integer) result.num_layers = layers->as_integer();
  if (!json.has("quant_method")) json.fail("quant_method", "a string");
  result.method = json.string("quant_method");
  for (const Method& method : kMethods)
    if (method.name == result.method) {
      method.read(result, json);
      if (result.method == "fp8") {
        read_expert_dtype(result, config);
        read_expert_dtype(result, json);
      }
      refuse_unread(json, result.method);
      config.adopt_ignored(key, json);
      return result;
    }
  std::string known;
  for (const Method& method : kMethods) known += fmt::format("{}{}", known.empty() ? "" : ", ", method.name);
  throw Unsupported("{}: 'quant_method' is {}; read are {}", json.file(), quote(result.method), known);
}

const QuantizationScheme* QuantizationConfig::scheme_of(std::string_view layer) const {
  if (schemes.empty()) return this;
  const Target* target = find_target(targets, layer);
  return target == nullptr ? nullptr : &schemes[target->scheme];
}

bool QuantizationConfig::ignores(std::string_view layer) const {
  const auto is_around_or_last = [&](const std::string& entry) { return is_part_of(entry, layer); };
  return find_target(plain, layer) != nullptr || std::any_of(ignored.begin(), ignored.end(), is_around_or_last);
}

bool QuantizationConfig::may_be_plain(std::string_view layer) const {
  const auto from_layers = [](std::string_view name) {
    const size_t at = name.find(".layers.");
    return at == std::string_view::npos ? std::string_view() : name.substr(at);
  };
  const std::string_view tail = from_layers(layer);
  return find_target(targets, layer) == nullptr || ignores(layer) ||
         std::any_of(plain.begin(), plain.end(), [&](const Target& entry) {
           const bool is_unread = entry.pattern == nullptr && entry.text.starts_with(kPattern);
           return is_unread || is_part_of(entry.text, layer) || (!tail.empty() && from_layers(entry.text) == tail);
         });
}

}  // namespace eadem::io
