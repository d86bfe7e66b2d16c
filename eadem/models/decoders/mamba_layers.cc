// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/decoders/mamba_layers.h"

#include <algorithm>
#include <cmath>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/recurrent_recipes.h"

namespace eadem::models {

void read_mamba(const io::JsonReader& config, const MambaKeys& keys, MambaConfig& result) {
  const auto integer = [&](std::string_view key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  result.heads = integer(keys.heads, keys.if_absent.heads);
  result.groups = integer(keys.groups, keys.if_absent.groups);
  result.state = integer(keys.state, keys.if_absent.state);
  result.taps = integer(keys.taps, keys.if_absent.taps);
  result.conv_bias = config.boolean_or(keys.conv_bias, keys.if_absent.conv_bias);
}

void write_mamba(const MambaConfig& mamba, const MambaKeys& keys, io::JsonValue& json) {
  json.set(std::string(keys.heads), mamba.heads).set(std::string(keys.groups), mamba.groups);
  json.set(std::string(keys.state), mamba.state).set(std::string(keys.taps), mamba.taps);
  json.set(std::string(keys.conv_bias), mamba.conv_bias);
}

void read_mamba_head_dim(const io::JsonReader& config, int64_t inner, MambaConfig& result) {
  const io::JsonValue* stated = config.value().find("mamba_d_head");
  if (stated == nullptr || stated->is_null() || (stated->is_string() && stated->as_string() == "auto")) {
    config.ignore("mamba_d_head");
    result.head_dim = inner / result.heads;
  } else {
    result.head_dim = config.integer("mamba_d_head", 1, kMaxExtent);
  }
  if (result.inner() != inner)
    throw DataCorrupted("{}: {} state-space heads of {} dimensions for {} in all", config.file(), result.heads,
                        result.head_dim, inner);
}

void read_time_step_limit(const io::JsonReader& config, MambaConfig& result) {
  if (!config.has("time_step_limit")) return config.ignore("time_step_limit");
  const auto fail = [&] { config.fail("time_step_limit", "two numbers, of which the second may be Infinity"); };
  const io::JsonValue* limits = config.raw("time_step_limit");
  if (!limits->is_array() || limits->as_array().size() != 2) fail();
  const auto number = [&](const io::JsonValue& value) -> double {
    if (value.kind() == io::JsonValue::Kind::integer || value.kind() == io::JsonValue::Kind::number)
      return value.as_number();
    const io::JsonValue* named = value.is_object() ? value.find("__float__") : nullptr;
    if (named == nullptr || !named->is_string() || named->as_string() != "Infinity") fail();
    return HUGE_VAL;
  };
  result.dt_min = number(limits->as_array()[0]);
  result.dt_max = number(limits->as_array()[1]);
}

io::JsonValue time_step_limit_of(const MambaConfig& mamba) {
  io::JsonValue limits = io::JsonValue::array();
  limits.push_back(mamba.dt_min);
  if (std::isinf(mamba.dt_max))
    limits.push_back(io::JsonValue::object().set("__float__", "Infinity"));
  else
    limits.push_back(mamba.dt_max);
  return limits;
}

namespace {

struct LayerKind {
  char letter;
  std::string_view name, classic;
};
constexpr LayerKind kLayerKinds[] = {
    {'M', "linear_attention", "mamba"}, {'*', "full_attention", "attention"}, {'-', "mlp", "mlp"}, {'E', "moe", "moe"}};

}  // namespace

std::optional<std::string> read_layer_pattern(const io::JsonReader& config) {
  std::optional<std::string> pattern;
  for (const char* key : {"layer_types", "layers_block_type"}) {
    if (!config.has(key)) {
      config.ignore(key);
      continue;
    }
    std::string own;
    for (const std::string& name : config.strings(key)) {
      const auto* kind = std::find_if(std::begin(kLayerKinds), std::end(kLayerKinds), [&](const LayerKind& known) {
        return name == known.name || name == known.classic;
      });
      if (kind == std::end(kLayerKinds))
        throw Unsupported("{}: '{}' has \"{}\", which is not honoured", config.file(), key, name);
      own += kind->letter;
    }
    if (pattern && *pattern != own)
      throw DataCorrupted("{}: 'layer_types' and 'layers_block_type' disagree", config.file());
    pattern = own;
  }
  return pattern;
}

io::JsonValue layer_kinds_of(const std::string& pattern) {
  io::JsonValue kinds = io::JsonValue::array();
  for (char letter : pattern)
    for (const LayerKind& kind : kLayerKinds)
      if (letter == kind.letter) kinds.push_back(std::string(kind.name));
  return kinds;
}

void read_mamba_gguf(const io::GgufFile& file, const std::string& prefix, MambaConfig& result) {
  const auto integer = [&](const char* key) { return file.integer(prefix + key, 1, kMaxExtent); };
  result.taps = integer("ssm.conv_kernel");
  result.state = integer("ssm.state_size");
  result.groups = integer("ssm.group_count");
  result.heads = integer("ssm.time_step_rank");
  const int64_t inner = integer("ssm.inner_size");
  if (inner % result.heads != 0)
    throw DataCorrupted("{}: an inner size of {} for {} state-space heads", file.path(), inner, result.heads);
  result.head_dim = inner / result.heads;
  const bool has_layers = std::any_of(file.tensors().begin(), file.tensors().end(), [](const io::WeightInfo& tensor) {
    return tensor.name.find(".ssm_") != std::string::npos;
  });
  if (!has_layers) return;  // no layer has any of these: what a config.json without them means stands
  result.conv_bias = result.norm = result.in_bias = result.out_bias = false;
  for (const io::WeightInfo& tensor : file.tensors()) {
    result.conv_bias = result.conv_bias || tensor.name.ends_with(".ssm_conv1d.bias");
    result.in_bias = result.in_bias || tensor.name.ends_with(".ssm_in.bias");
    result.out_bias = result.out_bias || tensor.name.ends_with(".ssm_out.bias");
    result.norm = result.norm || tensor.name.ends_with(".ssm_norm.weight");
  }
}

void write_mamba_gguf(const MambaConfig& mamba, const std::string& prefix, io::GgufMetadata& metadata, double dt_min) {
  const auto refuse = [](bool condition, const std::string& what) {
    if (condition) throw Unsupported("{}, which GGUF's architectures with state-space layers cannot state", what);
  };
  refuse(mamba.dt_min != dt_min || !std::isinf(mamba.dt_max),
         fmt::format("limits of time steps of {} and {}", mamba.dt_min, mamba.dt_max));
  refuse(mamba.norm && mamba.norm_before_gate, "a norm before the gate");
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  add("ssm.conv_kernel", mamba.taps);
  add("ssm.state_size", mamba.state);
  add("ssm.group_count", mamba.groups);
  add("ssm.inner_size", mamba.inner());
  add("ssm.time_step_rank", mamba.heads);
}

modules::Mamba2::Config mamba_of(const ModelConfig& config) {
  const MambaConfig& mamba = config.mamba;
  return {.hidden = config.hidden_size,
          .heads = mamba.heads,
          .head_dim = mamba.head_dim,
          .groups = mamba.groups,
          .state = mamba.state,
          .taps = mamba.taps,
          .conv_bias = mamba.conv_bias,
          .in_bias = mamba.in_bias,
          .out_bias = mamba.out_bias,
          .dt_min = mamba.dt_min,
          .dt_max = mamba.dt_max,
          .norm_eps = mamba.norm ? std::optional(config.rms_norm_eps) : std::nullopt,
          .norm_before_gate = mamba.norm_before_gate,
          .scales = mamba.multipliers};
}

namespace {

// Where the rows of a part begin in a tensor that has several, of `size` rows in all.
struct PartRows {
  int64_t begin, own, size;
};

// Of the parts [first, end) of a projection, the one at `index`.
PartRows rows_of_part(const modules::Mamba2::Config& mamba, size_t first, size_t end, size_t index) {
  PartRows rows{0, mamba.parts()[index].size, 0};
  for (size_t i = first; i < end; ++i) {
    if (i < index) rows.begin += mamba.parts()[i].size;
    rows.size += mamba.parts()[i].size;
  }
  return rows;
}

}  // namespace

std::vector<WeightRecipe> mamba_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                        CheckpointFormat format, std::string_view module) {
  constexpr std::string_view kScope = "mamba.";
  const LayerName name = layer_name(parameter.name);
  if (!name.rest.starts_with(kScope)) return {};
  const bool gguf = format == CheckpointFormat::gguf;
  const std::string part = name.rest.substr(kScope.size());  // "x_proj.weight"
  const std::string own = fmt::format(fmt::runtime(module), name.number),
                    block = fmt::format("blk.{}.ssm_", name.number);
  const modules::Mamba2::Config mamba = mamba_of(config);
  const auto tensor = [&](std::string_view huggingface, std::string_view in_gguf) {
    return gguf ? block + std::string(in_gguf) : own + std::string(huggingface);
  };
  const Shape heads{mamba.heads}, column{mamba.heads, 1};
  const auto of_heads = [&](const char* huggingface, const char* in_gguf) {
    const WeightRecipe stored = WeightRecipe::name(tensor(huggingface, in_gguf));
    return gguf ? WeightRecipe::reshape(stored, column, heads) : stored;
  };
  if (part == "dt_bias") return {WeightRecipe::name(tensor("dt_bias", "dt.bias"))};
  if (part == "D") return {of_heads("D", "d")};
  if (part == "A_log") return {decay_recipe(WeightRecipe::name(tensor("A_log", "a")), heads, format, column)};
  if (part == "norm.weight") {
    const Shape grouped{mamba.groups, mamba.inner() / mamba.groups};
    const WeightRecipe stored = WeightRecipe::name(tensor("norm.weight", "norm.weight"));
    return {gguf ? stored : WeightRecipe::reshape(stored, {mamba.inner()}, grouped)};
  }
  const size_t dot = part.find('.');
  const std::string end = part.substr(dot);  // ".weight" or ".bias"
  if (part.starts_with("out_proj")) return {WeightRecipe::name(tensor("out_proj" + end, "out" + end))};
  for (size_t i = 0; i < mamba.parts().size(); ++i) {
    const std::string projection = mamba.parts()[i].name + std::string("_proj"),
                      convolution = mamba.parts()[i].name + std::string("_conv");
    if (part.substr(0, dot) == projection) {
      const PartRows rows = rows_of_part(mamba, 0, 5, i);
      return {WeightRecipe::slice(tensor("in_proj" + end, "in" + end), 0, rows.begin, rows.own, rows.size)};
    }
    if (part.substr(0, dot) == convolution) {
      const PartRows rows = rows_of_part(mamba, 1, 4, i);
      WeightRecipe slice =
          WeightRecipe::slice(tensor("conv1d" + end, "conv1d" + end), 0, rows.begin, rows.own, rows.size);
      return {end == ".bias" ? slice : convolution_recipe(std::move(slice), rows.own, mamba.taps, format)};
    }
  }
  return {};
}

}  // namespace eadem::models
