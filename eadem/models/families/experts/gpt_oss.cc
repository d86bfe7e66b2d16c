// SPDX-License-Identifier: Apache-2.0
//
// GPT-OSS: experts in every layer, with biases and a SwiGLU whose operands are limited; a window in every other layer,
// from the first on; a sink for each head. In Hugging Face files gate and up of an expert are columns in turn.
// Source: transformers, models/gpt_oss; llama.cpp, conversion/gpt_oss.py and src/models/openai-moe-iswa.cpp (facts
// only).
#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kGptOssTypes[] = {{"gpt_oss", "gpt-oss", "GptOssForCausalLM", 131072, 8, 64}};
constexpr double kGptOssLimit = 7, kGptOssAlpha = 1.702;  // those of GGUF files
constexpr ConfigKey kGptOssKeys[] = {{"swiglu_limit", "", &ModelConfig::swiglu_limit, kGptOssLimit, 1e-6, 1e6},
                                     {"swiglu_alpha", "", &ModelConfig::swiglu_alpha, kGptOssAlpha, -1e6, 1e6}};
constexpr GgufName kGptOssGgufNames[] = {{"post_attention_layernorm.", "post_attention_norm."},
                                         {"self_attn.sinks", "attn_sinks.weight"}};
constexpr OwnName kGptOssTensorNames[] = {{"mlp.gate.", "mlp.router."}};

void read_gpt_oss_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope_or(config, 150000, result);
  if (!config.has("rope_parameters") && !config.has("rope_scaling"))
    result.rope_scaling = {
        .kind = modules::RopeScaling::Kind::yarn, .factor = 32, .original_max_positions = 4096, .truncate = false};
  read_attention_bias(config, result, true, true);
  read_windows(config, result, 2, 128);
  read_experts(config,
               {.count_key = "num_local_experts", .count = 128, .per_token = 4, .ffn = result.intermediate_size},
               result);
  result.norm_topk_prob = true;
}

void write_gpt_oss_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  // Without it there would be the scaling of published models.
  if (config.rope_scaling.kind == modules::RopeScaling::Kind::none) json.set("rope_scaling", rope_object({}));
  json.set("attention_bias", config.attention_bias);
  write_windows(config, json);
  write_experts(config, "num_local_experts", json);
}

// Other programs compute every file of this architecture with these windows.
void read_gpt_oss_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  result.mlp_bias = false;  // that of experts, which all models have
  set_windows(result, largest_window(result.layer_windows), 2);
  read_experts(file, prefix, result);
  result.norm_topk_prob = true;
}

void write_gpt_oss_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  require_windows(config, 2, "gpt-oss");
  if (config.swiglu_limit != kGptOssLimit || config.swiglu_alpha != kGptOssAlpha)
    throw Unsupported("swiglu_limit {} and swiglu_alpha {}, which GGUF's gpt-oss architecture cannot state",
                      config.swiglu_limit, config.swiglu_alpha);
  write_experts(config, prefix, metadata);
}

DecoderSpec gpt_oss_decoder(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  experts.router_bias = experts.expert_bias = true;
  experts.clamped = kernels::ClampedSwigluAttrs{.limit = static_cast<float>(config.swiglu_limit),
                                                .alpha = static_cast<float>(config.swiglu_alpha)};
  DecoderSpec spec = moe_decoder(config, experts);
  for (modules::LayerSpec& layer : spec.layers) std::get<modules::CausalAttention::Config>(layer.mixer).sinks = true;
  return spec;
}

// Gate and up are every second column of [experts, hidden, 2 ffn], or in MXFP4 every second row of
// [experts, 2 ffn, hidden]. A directory is written in the first form.
std::vector<WeightRecipe> gpt_oss_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                          CheckpointFormat format) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t at = parameter.name.find(kExperts);
  if (format == CheckpointFormat::gguf || at == std::string::npos) return {};
  const std::string experts = parameter.name.substr(0, at + kExperts.size());
  const std::string_view part = std::string_view(parameter.name).substr(experts.size());
  const bool is_down = part.starts_with("down_proj"), is_bias = part.ends_with(".bias");
  const int64_t first = part.starts_with("up_proj") ? 1 : 0, both = 2 * config.moe_intermediate_size;
  const std::string tensor = experts + (is_down ? "down_proj" : "gate_up_proj");
  if (is_bias)
    return {is_down ? WeightRecipe::name(tensor + "_bias") : WeightRecipe::every(tensor + "_bias", 1, first, 2, both)};
  if (is_down) return {WeightRecipe::transpose(WeightRecipe::name(tensor)), WeightRecipe::name(tensor + ".weight")};
  return {WeightRecipe::transpose(WeightRecipe::every(tensor, 2, first, 2, both)),
          WeightRecipe::every(tensor + ".weight", 1, first, 2, both)};
}

}  // namespace

const ModelFamily& gpt_oss_family() {
  static const ModelFamily kFamily = {.name = "gpt_oss",
                                      .types = kGptOssTypes,
                                      .keys = kGptOssKeys,
                                      .eps = 1e-5,
                                      .yarn_truncates = false,
                                      .gguf_keys = kExpertGgufKeys,
                                      .router_aux_loss_coef = 0.001,
                                      .read_json = read_gpt_oss_json,
                                      .read_gguf = read_gpt_oss_gguf,
                                      .write_json = write_gpt_oss_json,
                                      .write_gguf = write_gpt_oss_gguf,
                                      .decoder = gpt_oss_decoder,
                                      .gguf_names = kGptOssGgufNames,
                                      .tensor_names = kGptOssTensorNames,
                                      .recipes = gpt_oss_recipes};
  return kFamily;
}

}  // namespace eadem::models
