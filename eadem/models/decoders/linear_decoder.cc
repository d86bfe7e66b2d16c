// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/decoders/linear_decoder.h"

#include <algorithm>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/family.h"
#include "eadem/models/recurrent_recipes.h"

namespace eadem::models {

namespace {

constexpr int64_t kInterval = 4;

std::vector<int64_t> layers_between(int64_t layers, int64_t interval) {
  std::vector<int64_t> linear;
  for (int64_t layer = 0; layer < layers; ++layer)
    if ((layer + 1) % interval != 0) linear.push_back(layer);
  return linear;
}

// [begin, begin + size) along an axis of a tensor.
struct Part {
  int64_t begin, size;
};

}  // namespace

void read_linear_attention(const io::JsonReader& config, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  result.linear_key_heads = integer("linear_num_key_heads", 16);
  result.linear_value_heads = integer("linear_num_value_heads", 32);
  result.linear_key_dim = integer("linear_key_head_dim", 128);
  result.linear_value_dim = integer("linear_value_head_dim", 128);
  result.linear_taps = integer("linear_conv_kernel_dim", 4);
  result.linear_layers = layers_between(result.num_hidden_layers, integer("full_attention_interval", kInterval));
  if (!config.has("layer_types")) return config.ignore("layer_types");  // null
  const std::vector<std::string> types = config.strings("layer_types");
  if (std::ssize(types) != result.num_hidden_layers)
    config.fail("layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  result.linear_layers.clear();
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] == "linear_attention")
      result.linear_layers.push_back(static_cast<int64_t>(layer));
    else if (types[layer] != "full_attention")
      config.fail("layer_types", "only \"full_attention\" and \"linear_attention\"");
  }
}

void write_linear_attention(const ModelConfig& config, io::JsonValue& json) {
  json.set("linear_num_key_heads", config.linear_key_heads).set("linear_num_value_heads", config.linear_value_heads);
  json.set("linear_key_head_dim", config.linear_key_dim).set("linear_value_head_dim", config.linear_value_dim);
  json.set("linear_conv_kernel_dim", config.linear_taps);
  io::JsonValue types = io::JsonValue::array();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    types.push_back(config.is_linear(layer) ? "linear_attention" : "full_attention");
  json.set("layer_types", std::move(types));
}

void read_linear_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const auto integer = [&](const char* key) { return file.integer(prefix + key, 1, kMaxExtent); };
  result.linear_key_heads = integer("ssm.group_count");
  result.linear_value_heads = integer("ssm.time_step_rank");
  result.linear_key_dim = integer("ssm.state_size");
  result.linear_taps = integer("ssm.conv_kernel");
  const int64_t values = integer("ssm.inner_size");
  if (values % result.linear_value_heads != 0)
    throw DataCorrupted("{}: '{}ssm.inner_size' is {} for {} heads", file.path(), prefix, values,
                        result.linear_value_heads);
  result.linear_value_dim = values / result.linear_value_heads;
  result.linear_layers =
      layers_between(result.num_hidden_layers,
                     file.optional_integer(prefix + "full_attention_interval", 1, kMaxLayers).value_or(kInterval));
}

void write_linear_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  // The first layer of attention says the interval; without one no layer reaches it.
  int64_t interval = 1;
  while (interval <= config.num_hidden_layers && config.is_linear(interval - 1)) ++interval;
  if (config.linear_layers != layers_between(config.num_hidden_layers, interval))
    throw Unsupported("layers of attention at no regular interval, which GGUF's {} architecture cannot state",
                      config.family().find_type(config.model_type)->gguf_architecture);
  if (config.linear_key_dim != config.linear_value_dim)
    throw Unsupported("heads of linear attention of {} for keys and {} for values, which other programs refuse",
                      config.linear_key_dim, config.linear_value_dim);
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("ssm.conv_kernel", config.linear_taps);
  add("ssm.state_size", config.linear_key_dim);
  add("ssm.group_count", config.linear_key_heads);
  add("ssm.time_step_rank", config.linear_value_heads);
  add("ssm.inner_size", config.linear_value_heads * config.linear_value_dim);
  add("full_attention_interval", interval);
}

void set_linear_layers(const ModelConfig& config, DecoderSpec& spec) {
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    modules::LayerSpec& own = spec.layers[static_cast<size_t>(layer)];
    if (!config.is_linear(layer))
      std::get<modules::CausalAttention::Config>(own.mixer).gated = true;
    else
      own.mixer = modules::GatedDeltaNet::Config{.hidden = config.hidden_size,
                                                 .key_heads = config.linear_key_heads,
                                                 .value_heads = config.linear_value_heads,
                                                 .key_dim = config.linear_key_dim,
                                                 .value_dim = config.linear_value_dim,
                                                 .taps = config.linear_taps,
                                                 .tiled = config.linear_heads_tiled,
                                                 .norm_eps = config.rms_norm_eps};
  }
}

namespace {

// Recipes for one parameter of a layer of linear attention.
class LinearRecipes {
 public:
  LinearRecipes(const ModelConfig& config, CheckpointFormat format, const LinearNames& names, std::string layer)
      : config_(config),
        names_(names),
        format_(format),
        gguf_(format == CheckpointFormat::gguf),
        number_(std::move(layer)),
        reorders_((gguf_ && names.gguf_tiled && group() > 1 && config.linear_key_heads > 1) !=
                  config.linear_heads_tiled) {}

  // `part`: what follows "linear_attn." in its name.
  std::vector<WeightRecipe> of(const std::string& part) const {
    const int64_t keys = config_.linear_key_heads * config_.linear_key_dim, values = value_rows(),
                  all = 2 * keys + values;
    if (part == "q_conv1d.weight") return {convolution(0, keys, all)};
    if (part == "k_conv1d.weight") return {convolution(keys, keys, all)};
    if (part == "v_conv1d.weight") return {convolution(2 * keys, values, all)};
    if (part == "A_log") return {rate()};
    if (part == "dt_bias") return {value_heads(gguf_ ? "ssm_dt.bias" : "dt_bias", 0, 1, config_.linear_value_heads)};
    if (part == "o_proj.weight") return {out()};
    if (part == "norm.weight") return {WeightRecipe::name(tensor(gguf_ ? "ssm_norm.weight" : "norm.weight"))};
    if (part == "b_proj.weight" || part == "a_proj.weight") return {gate(part[0])};
    if (!gguf_ && names_.grouped) return {grouped(part[0])};
    const char* qkv = gguf_ ? "attn_qkv.weight" : "in_proj_qkv.weight";
    if (part == "q_proj.weight") return {WeightRecipe::slice(tensor(qkv), 0, 0, keys, all)};
    if (part == "k_proj.weight") return {WeightRecipe::slice(tensor(qkv), 0, keys, keys, all)};
    if (part == "v_proj.weight") return {value_heads(qkv, 2 * keys, config_.linear_value_dim, all)};
    return {value_heads(gguf_ ? "attn_gate.weight" : "in_proj_z.weight", 0, config_.linear_value_dim, values)};
  }

 private:
  int64_t value_rows() const { return config_.linear_value_heads * config_.linear_value_dim; }
  int64_t group() const { return config_.linear_value_heads / config_.linear_key_heads; }

  std::string tensor(const std::string& name) const {
    return gguf_ ? fmt::format("blk.{}.{}", number_, name)
                 : fmt::format("model.layers.{}.linear_attn.{}", number_, name);
  }

  // Parts of `size` along an axis of a tensor, in the order of heads; `begins` in the file.
  WeightRecipe joined(const std::string& name, int axis, const std::vector<Part>& parts, int64_t whole) const {
    if (parts.size() == 1 && parts[0].size == whole) return WeightRecipe::name(name);
    std::vector<WeightRecipe> slices;
    std::vector<int64_t> sizes;
    for (const Part& part : parts) {
      slices.push_back(WeightRecipe::slice(name, axis, part.begin, part.size, whole));
      sizes.push_back(part.size);
    }
    return slices.size() == 1 ? slices[0] : WeightRecipe::concat(std::move(slices), axis, std::move(sizes));
  }

  // Where the value heads of `dim` rows each lie that begin at `begin`.
  std::vector<Part> value_parts(int64_t begin, int64_t dim) const {
    if (!reorders_) return {{begin, config_.linear_value_heads * dim}};
    // Head h of ours is the h / n-th of the (h mod n)-th run of n in the file.
    const int64_t n = config_.linear_heads_tiled ? config_.linear_key_heads : group(),
                  runs = config_.linear_value_heads / n;
    std::vector<Part> parts;
    for (int64_t h = 0; h < config_.linear_value_heads; ++h)
      parts.push_back({begin + (h % n * runs + h / n) * dim, dim});
    return parts;
  }
  WeightRecipe value_heads(const std::string& name, int64_t begin, int64_t dim, int64_t whole) const {
    return joined(tensor(name), 0, value_parts(begin, dim), whole);
  }

  WeightRecipe out() const {
    return joined(tensor(gguf_ ? "ssm_out.weight" : "out_proj.weight"), 1, value_parts(0, config_.linear_value_dim),
                  value_rows());
  }

  WeightRecipe rate() const {
    const Shape heads{config_.linear_value_heads};
    return decay_recipe(value_heads(gguf_ ? "ssm_a" : "A_log", 0, 1, config_.linear_value_heads), heads, format_,
                        heads);
  }

  WeightRecipe convolution(int64_t begin, int64_t channels, int64_t all) const {
    const std::string name = tensor(gguf_ ? "ssm_conv1d.weight" : "conv1d.weight");
    const bool values = begin == all - channels;
    return convolution_recipe(
        joined(name, 0, values ? value_parts(begin, config_.linear_value_dim) : std::vector<Part>{{begin, channels}},
               all),
        channels, config_.linear_taps, format_);
  }

  // b or a, a row for each value head.
  WeightRecipe gate(char name) const {
    const bool is_b = name == 'b';
    if (gguf_ ? !names_.gguf_grouped : !names_.grouped)
      return value_heads(
          gguf_ ? (is_b ? "ssm_beta.weight" : "ssm_alpha.weight") : (is_b ? "in_proj_b.weight" : "in_proj_a.weight"), 0,
          1, config_.linear_value_heads);
    std::vector<Part> parts;
    for (int64_t key_head = 0; key_head < config_.linear_key_heads; ++key_head)
      parts.push_back({2 * group() * key_head + (is_b ? 0 : group()), group()});
    return joined(tensor(gguf_ ? "ssm_ba.weight" : "in_proj_ba.weight"), 0, parts, 2 * config_.linear_value_heads);
  }

  // q, k, v or z of a tensor that has them for one key head after the other.
  WeightRecipe grouped(char name) const {
    const int64_t key = config_.linear_key_dim, value = group() * config_.linear_value_dim, rows = 2 * (key + value);
    const Part own = name == 'q'   ? Part{0, key}
                     : name == 'k' ? Part{key, key}
                     : name == 'v' ? Part{2 * key, value}
                                   : Part{2 * key + value, value};
    std::vector<Part> parts;
    for (int64_t key_head = 0; key_head < config_.linear_key_heads; ++key_head)
      parts.push_back({key_head * rows + own.begin, own.size});
    return joined(tensor("in_proj_qkvz.weight"), 0, parts, config_.linear_key_heads * rows);
  }

  const ModelConfig& config_;
  const LinearNames& names_;
  CheckpointFormat format_;
  bool gguf_;
  std::string number_;
  bool reorders_;  // value heads stand in another order in the file
};

// q_proj, or the gate of attention: the file's q_proj has, for each head, rows of its query and then of its gate.
WeightRecipe query_or_gate(const ModelConfig& config, const std::string& tensor, bool is_gate) {
  const int64_t dim = config.head_dim, whole = 2 * config.num_attention_heads * dim;
  std::vector<WeightRecipe> heads;
  for (int64_t h = 0; h < config.num_attention_heads; ++h)
    heads.push_back(WeightRecipe::slice(tensor, 0, (2 * h + (is_gate ? 1 : 0)) * dim, dim, whole));
  return WeightRecipe::concat(std::move(heads), 0,
                              std::vector<int64_t>(static_cast<size_t>(config.num_attention_heads), dim));
}

}  // namespace

std::vector<WeightRecipe> linear_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format, const LinearNames& names) {
  const LayerName name = layer_name(parameter.name);
  constexpr std::string_view kLinear = "linear_attn.";
  if (name.rest.starts_with(kLinear))
    return LinearRecipes(config, format, names, name.number).of(name.rest.substr(kLinear.size()));
  const bool gguf = format == CheckpointFormat::gguf;
  for (const bool is_gate : {false, true}) {
    const std::string_view part = is_gate ? "self_attn.g_proj." : "self_attn.q_proj.";
    if (!name.rest.starts_with(part)) continue;
    const std::string kind = name.rest.substr(part.size());  // "weight" or "bias"
    const std::string own = fmt::format("model.layers.{}.self_attn.q_proj.{}", name.number, kind);
    return {query_or_gate(config, gguf ? gguf_name(own) : own, is_gate)};
  }
  // GGUF files have the sum.
  if (!gguf && parameter.name.ends_with("norm.weight"))
    return {WeightRecipe::add(WeightRecipe::name(parameter.name), 1)};
  return {};
}

}  // namespace eadem::models
