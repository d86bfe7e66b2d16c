// SPDX-License-Identifier: Apache-2.0
//
// Llama 4, the text part: layers that rotate pairs of neighbours and see the tokens of their own chunk, with norms of q
// and k that have no weights, and layers, usually every fourth, that rotate nothing and see everything, whose queries
// grow with their positions. The sigmoid of a router's logit multiplies what its expert reads; one further expert
// computes every token. Layers without experts have an MLP of another width.
// Source: transformers, models/llama4; llama.cpp, conversion/llama4.py and src/models/llama4.cpp (facts only).
#include <algorithm>
#include <cmath>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kLlama4Types[] = {{"llama4_text", "llama4", "Llama4ForCausalLM", 131072, 8, 128}};
constexpr int64_t kUsualChunk = 8192, kUsualNopeInterval = 4;
constexpr double kUsualAttnScale = 0.1, kUsualFloorScale = 8192;
// llama.cpp takes this number of experts for the model without norms of q and k.
constexpr int64_t kExpertsWithoutNorms = 128;
constexpr ConfigKey kLlama4Keys[] = {
    {"attn_scale", "", &ModelConfig::attn_scale, kUsualAttnScale, -1e6, 1e6},
    {"floor_scale", "", &ModelConfig::floor_scale, kUsualFloorScale, 1, 1e9, /*whole=*/true}};
// The plain name is the width of experts.
constexpr OwnName kLlama4JsonNames[] = {{"intermediate_size", "intermediate_size_mlp"}};
constexpr OwnName kLlama4TensorNames[] = {{"mlp.gate.", "feed_forward.router."}, {"mlp.", "feed_forward."}};

// Every interval-th layer, the first of them being layer interval - 1.
std::vector<int64_t> llama4_every(int64_t interval, int64_t layers) {
  std::vector<int64_t> result;
  for (int64_t layer = interval - 1; layer < layers; layer += interval) result.push_back(layer);
  return result;
}

bool has_layer(const std::vector<int64_t>& layers, int64_t layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

void set_expert_layers(ModelConfig& config, const std::vector<int64_t>& layers) {
  config.mlp_only_layers.clear();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    if (!has_layer(layers, layer)) config.mlp_only_layers.push_back(layer);
}

std::vector<int64_t> expert_layers(const ModelConfig& config) {
  std::vector<int64_t> result;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    if (config.has_experts(layer)) result.push_back(layer);
  return result;
}

// Layers that rotate have chunks, others have none.
void set_chunks_by_rotation(ModelConfig& config, int64_t chunk) {
  config.layer_chunks.assign(static_cast<size_t>(config.num_hidden_layers), chunk);
  for (int64_t layer : config.nope_layers) config.layer_chunks[static_cast<size_t>(layer)] = 0;
}

// Files of the first days have a number in the place of true.
bool tunes_temperature(const io::JsonReader& config) {
  constexpr std::string_view kKey = "attn_temperature_tuning";
  if (!config.has(kKey)) {
    config.ignore(kKey);  // null
    return true;
  }
  const io::JsonValue::Kind kind = config.value().find(kKey)->kind();
  if (kind == io::JsonValue::Kind::integer) return config.integer(kKey, 0, kMaxExtent) != 0;
  return config.boolean(kKey);
}

// `no_rope_layers` has 1 for each layer that rotates, and may say more than there are; empty, it says nothing.
void read_llama4_rotation(const io::JsonReader& config, ModelConfig& result) {
  const int64_t interval =
      config.optional_integer("no_rope_layer_interval", 1, kMaxLayers).value_or(kUsualNopeInterval);
  const std::vector<int64_t> rotates =
      config.has("no_rope_layers") ? config.integers("no_rope_layers", 0, 1) : std::vector<int64_t>();
  if (!config.has("no_rope_layers")) config.ignore("no_rope_layers");  // null
  result.nope_layers = rotates.empty() ? llama4_every(interval, result.num_hidden_layers) : std::vector<int64_t>();
  if (rotates.empty()) return;
  if (static_cast<int64_t>(rotates.size()) < result.num_hidden_layers)
    config.fail("no_rope_layers", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  for (int64_t layer = 0; layer < result.num_hidden_layers; ++layer)
    if (rotates[static_cast<size_t>(layer)] == 0) result.nope_layers.push_back(layer);
}

// `layer_types` decides where it is there. transformers needs the size of chunks even where no layer has any.
void read_llama4_chunks(const io::JsonReader& config, ModelConfig& result) {
  int64_t chunk = kUsualChunk;
  if (config.value().find("attention_chunk_size") != nullptr)
    chunk = config.integer("attention_chunk_size", 1, kMaxExtent);
  set_chunks_by_rotation(result, chunk);
  if (!config.has("layer_types")) return config.ignore("layer_types");  // null
  const std::vector<std::string> types = config.strings("layer_types");
  if (types.size() != result.layer_chunks.size())
    config.fail("layer_types", fmt::format("{} entries, one per layer", result.num_hidden_layers));
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] != "chunked_attention" && types[layer] != "full_attention")
      config.fail("layer_types", "only \"full_attention\" and \"chunked_attention\"");
    result.layer_chunks[layer] = types[layer] == "chunked_attention" ? chunk : 0;
  }
}

void read_llama4_experts(const io::JsonReader& config, ModelConfig& result) {
  result.num_experts = config.optional_integer("num_local_experts", 1, kMaxExperts).value_or(16);
  result.num_experts_per_tok = config.optional_integer("num_experts_per_tok", 1, kMaxExperts).value_or(1);
  result.moe_intermediate_size = config.integer("intermediate_size", 1, kMaxExtent);
  result.shared_expert_intermediate_size = result.moe_intermediate_size;
  const int64_t step = config.optional_integer("interleave_moe_layer_step", 1, kMaxLayers).value_or(1);
  if (config.has("moe_layers")) return set_expert_layers(result, config.integers("moe_layers", 0, kMaxLayers));
  config.ignore("moe_layers");  // null
  set_expert_layers(result, llama4_every(step, result.num_hidden_layers));
}

void read_llama4_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope_or(config, 500000.0, result);
  read_attention_bias(config, result, false, true);
  result.qk_norm = config.optional_boolean("use_qk_norm").value_or(true);
  result.attn_temperature_tuning = tunes_temperature(config);
  if (result.floor_scale != std::floor(result.floor_scale)) config.fail("floor_scale", "an integer");
  read_llama4_rotation(config, result);
  read_llama4_chunks(config, result);
  read_llama4_experts(config, result);
}

void write_llama4_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  io::JsonValue rotates = io::JsonValue::array(), types = io::JsonValue::array(), experts = io::JsonValue::array();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    rotates.push_back(has_layer(config.nope_layers, layer) ? 0 : 1);
    types.push_back(config.layer_chunks[static_cast<size_t>(layer)] > 0 ? "chunked_attention" : "full_attention");
  }
  for (int64_t layer : expert_layers(config)) experts.push_back(layer);
  const int64_t chunk = largest_window(config.layer_chunks);
  json.set("intermediate_size", config.moe_intermediate_size).set("attention_bias", config.attention_bias);
  json.set("num_local_experts", config.num_experts).set("num_experts_per_tok", config.num_experts_per_tok);
  json.set("moe_layers", std::move(experts)).set("use_qk_norm", config.qk_norm);
  json.set("no_rope_layers", std::move(rotates)).set("layer_types", std::move(types));
  json.set("attention_chunk_size", chunk > 0 ? chunk : kUsualChunk);
  json.set("attn_temperature_tuning", config.attn_temperature_tuning);
}

// Other programs compute every file of this architecture so, whatever it says of windows.
void set_usual_attention(ModelConfig& config) {
  config.nope_layers = llama4_every(kUsualNopeInterval, config.num_hidden_layers);
  set_chunks_by_rotation(config, kUsualChunk);
  config.attn_temperature_tuning = true;
  config.attn_scale = kUsualAttnScale;
  config.floor_scale = kUsualFloorScale;
  config.qk_norm = config.num_experts != kExpertsWithoutNorms;
}

void read_llama4_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  const std::string window = prefix + "attention.sliding_window";
  if (const auto stated = file.optional_integer(window, 0, kMaxExtent); stated && *stated != kUsualChunk)
    throw Unsupported("{}: '{}' is {}; only {} is honoured, the size of chunks", file.path(), window, *stated,
                      kUsualChunk);
  result.layer_windows.assign(static_cast<size_t>(result.num_hidden_layers), 0);
  read_experts(file, prefix, result);
  require_gating(file, prefix, 2);
  result.shared_expert_intermediate_size = result.moe_intermediate_size;
  const int64_t step = file.integer(prefix + "interleave_moe_layer_step", 1, kMaxLayers);
  set_expert_layers(result, llama4_every(step, result.num_hidden_layers));
  set_usual_attention(result);
}

void write_llama4_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, const std::string& what) {
    if (condition) throw Unsupported("{}, which GGUF's llama4 architecture cannot state", what);
  };
  ModelConfig usual = config;
  set_usual_attention(usual);
  refuse(config.nope_layers != usual.nope_layers, "other layers than every fourth rotate nothing");
  refuse(
      config.layer_chunks != usual.layer_chunks,
      fmt::format("attention by chunks of {}, or not in all layers that rotate", largest_window(config.layer_chunks)));
  refuse(config.attn_temperature_tuning != usual.attn_temperature_tuning || config.attn_scale != usual.attn_scale ||
             config.floor_scale != usual.floor_scale,
         fmt::format("attn_temperature_tuning {}, attn_scale {} and floor_scale {}", config.attn_temperature_tuning,
                     config.attn_scale, config.floor_scale));
  refuse(config.qk_norm != usual.qk_norm,
         fmt::format("use_qk_norm {} with {} experts", config.qk_norm, config.num_experts));
  refuse(config.attention_bias, "biases of attention");
  const std::vector<int64_t> layers = expert_layers(config);
  const int64_t step = layers.empty() ? 0 : layers.front() + 1;
  refuse(layers.empty() || layers != llama4_every(step, config.num_hidden_layers), "experts at no regular interval");
  write_experts(config, prefix, metadata);
  metadata.emplace_back(prefix + "interleave_moe_layer_step", io::GgufValue::scalar(static_cast<uint32_t>(step)));
}

DecoderSpec llama4_decoder(const ModelConfig& config) {
  using Attention = modules::CausalAttention::Config;
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.scoring = kernels::RouteAttrs::Scoring::sigmoid;
  experts.weighs_input = true;
  experts.shared = {.name = "shared_expert", .ffn = config.shared_expert_intermediate_size};
  DecoderSpec spec = moe_decoder(config, experts, kernels::RopeStyle::interleaved);
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    Attention& attention = std::get<Attention>(spec.layers[layer].mixer);
    attention.qk_norm = Attention::QkNorm::weightless_after_rope;
    if (!has_layer(config.nope_layers, static_cast<int64_t>(layer))) continue;
    attention.qk_norm_eps.reset();
    attention.rope = {.rotary_dim = 0};
    if (config.attn_temperature_tuning)
      attention.temperature = {static_cast<float>(config.attn_scale), static_cast<int64_t>(config.floor_scale),
                               /*plus_one=*/true};
  }
  return spec;
}

// Experts are [experts, hidden, 2 ffn], the halves being gate and up, and [experts, ffn, hidden]; quantized ones are
// published as a matrix each.
std::vector<WeightRecipe> llama4_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t at = parameter.name.find(kExperts);
  if (format == CheckpointFormat::gguf || at == std::string::npos) return {};
  const std::string experts = parameter.name.substr(0, at) + ".feed_forward.experts.";
  const std::string_view part = std::string_view(parameter.name).substr(at + kExperts.size());
  const WeightRecipe each = expert_recipes(config, parameter, format, {.module = "feed_forward"}).front();
  if (part.starts_with("down_proj")) return {WeightRecipe::transpose(WeightRecipe::name(experts + "down_proj")), each};
  const int64_t ffn = config.moe_intermediate_size, begin = part.starts_with("up_proj") ? ffn : 0;
  return {WeightRecipe::transpose(WeightRecipe::slice(experts + "gate_up_proj", 2, begin, ffn, 2 * ffn)), each};
}

}  // namespace

const ModelFamily& llama4_family() {
  static const ModelFamily kFamily = {.name = "llama4",
                                      .types = kLlama4Types,
                                      .keys = kLlama4Keys,
                                      .eps = 1e-5,
                                      .json_names = kLlama4JsonNames,
                                      .gguf_keys =
                                          "expert_count expert_used_count expert_feed_forward_length "
                                          "interleave_moe_layer_step expert_gating_func",
                                      .read_json = read_llama4_json,
                                      .read_gguf = read_llama4_gguf,
                                      .write_json = write_llama4_json,
                                      .write_gguf = write_llama4_gguf,
                                      .decoder = llama4_decoder,
                                      .tensor_names = kLlama4TensorNames,
                                      .recipes = llama4_recipes};
  return kFamily;
}

}  // namespace eadem::models
