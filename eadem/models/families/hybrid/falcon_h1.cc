// SPDX-License-Identifier: Apache-2.0
//
// Falcon-H1: attention and Mamba-2 side by side in every layer, with multipliers of almost all that they and the MLPs
// read and write. GGUF files have the multipliers within the weights.
// Source: transformers, models/falcon_h1; llama.cpp, conversion/falcon_h1.py and src/models/falcon-h1.cpp (facts only).
#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/decoders/mamba_layers.h"

namespace eadem::models {

const ModelFamily& falcon_h1_family();

namespace {

constexpr ModelType kFalconTypes[] = {{.name = "falcon_h1",
                                       .gguf_architecture = "falcon-h1",
                                       .python_class = "FalconH1ForCausalLM",
                                       .max_position_embeddings = 8192,
                                       .num_key_value_heads = 8}};

constexpr ConfigKey kFalconKeys[] = {
    {"embedding_multiplier", "", &ModelConfig::embedding_multiplier, 1, 1e-9, 1e9},
    {"lm_head_multiplier", "", &ModelConfig::logit_scale, 1, 1e-9, 1e9},
    {"key_multiplier", "", &ModelConfig::key_multiplier, 1, -1e9, 1e9},
    {"attention_in_multiplier", "", &ModelConfig::attention_in_multiplier, 1, -1e9, 1e9},
    {"attention_out_multiplier", "", &ModelConfig::attention_out_multiplier, 1, -1e9, 1e9},
    {"ssm_in_multiplier", "", &ModelConfig::ssm_in_multiplier, 1, -1e9, 1e9},
    {"ssm_out_multiplier", "", &ModelConfig::ssm_out_multiplier, 1, -1e9, 1e9}};

constexpr OwnName kFalconNames[] = {{"model.norm.weight", "model.final_layernorm.weight"},
                                    {"post_attention_layernorm.", "pre_ff_layernorm."},
                                    {"mlp.", "feed_forward."}};
// llama.cpp's converter gives this norm no suffix.
constexpr GgufName kFalconGgufNames[] = {{"post_attention_layernorm.weight", "ffn_norm"}};

std::vector<double> read_multipliers(const io::JsonReader& config, const char* key, size_t count) {
  if (!config.has(key)) {
    config.ignore(key);
    return std::vector<double>(count, 1.0);
  }
  std::vector<double> multipliers = config.numbers(key, -1e9, 1e9);
  if (multipliers.size() != count) config.fail(key, fmt::format("{} numbers", count));
  return multipliers;
}

void read_falcon_json(const io::JsonReader& config, ModelConfig& result) {
  read_rope(config, result);
  read_attention_bias(config, result, false, true);
  result.mlp_bias = config.optional_boolean("mlp_bias").value_or(false);
  MambaConfig& mamba = result.mamba;
  require_silu(config, result, "state-space mixers");
  read_mamba(config, {}, mamba);
  const int64_t expanded = config.optional_integer("mamba_expand", 1, 1024).value_or(2) * result.hidden_size;
  const bool is_null = config.value().find("mamba_d_ssm") != nullptr && !config.has("mamba_d_ssm");
  read_mamba_head_dim(config, config.optional_integer("mamba_d_ssm", 1, kMaxExtent).value_or(is_null ? expanded : 1024),
                      mamba);
  read_time_step_limit(config, mamba);
  mamba.in_bias = config.optional_boolean("mamba_proj_bias").value_or(false);
  mamba.out_bias = config.optional_boolean("projectors_bias").value_or(false);
  mamba.norm = config.optional_boolean("mamba_rms_norm").value_or(false);
  const bool before = config.boolean_or("mamba_norm_before_gate", true);
  mamba.norm_before_gate = mamba.norm && before;
  const std::vector<double> of_mlp = read_multipliers(config, "mlp_multipliers", 2),
                            of_parts = read_multipliers(config, "ssm_multipliers", mamba.multipliers.size());
  result.mlp_gate_multiplier = of_mlp[0];
  result.mlp_down_multiplier = of_mlp[1];
  std::copy(of_parts.begin(), of_parts.end(), mamba.multipliers.begin());
}

void write_falcon_json(const ModelConfig& config, io::JsonValue& json) {
  write_rope(config, json);
  json.set("attention_bias", config.attention_bias).set("mlp_bias", config.mlp_bias);
  const MambaConfig& mamba = config.mamba;
  write_mamba(mamba, {}, json);
  json.set("mamba_d_head", mamba.head_dim).set("mamba_d_ssm", mamba.inner());
  json.set("time_step_limit", time_step_limit_of(mamba));
  json.set("mamba_proj_bias", mamba.in_bias).set("projectors_bias", mamba.out_bias);
  json.set("mamba_rms_norm", mamba.norm).set("mamba_norm_before_gate", mamba.norm_before_gate);
  io::JsonValue of_mlp = io::JsonValue::array(), of_parts = io::JsonValue::array();
  of_mlp.push_back(config.mlp_gate_multiplier).push_back(config.mlp_down_multiplier);
  for (double multiplier : mamba.multipliers) of_parts.push_back(multiplier);
  json.set("mlp_multipliers", std::move(of_mlp)).set("ssm_multipliers", std::move(of_parts));
}

void read_falcon_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  read_mamba_gguf(file, prefix, result.mamba);
}

void write_falcon_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto refuse = [](bool condition, std::string_view what) {
    if (condition) throw Unsupported("{}, which GGUF's falcon-h1 architecture cannot state", what);
  };
  refuse(config.attention_bias || config.mlp_bias || config.mamba.in_bias || config.mamba.out_bias,
         "biases of projections");
  refuse(config.tie_word_embeddings && (config.embedding_multiplier != 1 || config.logit_scale != 1),
         "one matrix for embeddings and logits with multipliers of each");
  write_mamba_gguf(config.mamba, prefix, metadata);
}

DecoderSpec falcon_decoder(const ModelConfig& config) {
  DecoderSpec spec = dense_decoder(config, {});
  modules::ParallelMixers::Config mixers{.mamba = mamba_of(config),
                                         .attention_in = config.attention_in_multiplier,
                                         .attention_out = config.attention_out_multiplier,
                                         .mamba_out = config.ssm_out_multiplier};
  // On what is projected where a bias is added to that, and else on the projections, which have multipliers anyway.
  if (config.mamba.in_bias)
    mixers.mamba_in = config.ssm_in_multiplier;
  else
    for (double& scale : mixers.mamba.scales) scale *= config.ssm_in_multiplier;
  for (modules::LayerSpec& layer : spec.layers) {
    mixers.attention = std::get<modules::CausalAttention::Config>(layer.mixer);
    mixers.attention.scale *= config.key_multiplier;
    auto& mlp = std::get<modules::DenseMlp::Config>(layer.mlp);
    mlp.gate_scale = config.mlp_gate_multiplier;
    mlp.down_scale = config.mlp_down_multiplier;
    layer.mixer = mixers;
  }
  return spec;
}

// What the weights of GGUF files are multiplied by, beyond those of other files.
double folded_multiplier(const ModelConfig& config, const std::string& parameter) {
  if (parameter == "model.embed_tokens.weight") return config.embedding_multiplier;
  if (parameter == "lm_head.weight") return config.logit_scale;
  const LayerName name = layer_name(parameter);
  const std::pair<std::string_view, double> kFactors[] = {
      {"self_attn.q_proj.", config.attention_in_multiplier},
      {"self_attn.k_proj.", config.attention_in_multiplier * config.key_multiplier},
      {"self_attn.v_proj.", config.attention_in_multiplier},
      {"self_attn.o_proj.", config.attention_out_multiplier},
      {"mlp.gate_proj.", config.mlp_gate_multiplier},
      {"mlp.down_proj.", config.mlp_down_multiplier},
      {"mamba.out_proj.", config.ssm_out_multiplier}};
  for (const auto& [part, factor] : kFactors)
    if (name.rest.starts_with(part)) return factor;
  const auto parts = mamba_of(config).parts();
  for (size_t i = 0; i < parts.size(); ++i)
    if (name.rest.starts_with(fmt::format("mamba.{}_proj.", parts[i].name)))
      return config.ssm_in_multiplier * config.mamba.multipliers[i];
  return 1;
}

std::vector<WeightRecipe> falcon_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format) {
  std::vector<WeightRecipe> recipes = mamba_recipes(config, parameter, format);
  const double factor = format == CheckpointFormat::gguf ? folded_multiplier(config, parameter.name) : 1;
  if (factor == 1) return recipes;
  if (recipes.empty()) recipes.push_back(WeightRecipe::name(gguf_name(parameter.name, &falcon_h1_family())));
  for (WeightRecipe& recipe : recipes) recipe = WeightRecipe::scale(std::move(recipe), 1 / factor);
  return recipes;
}

}  // namespace

const ModelFamily& falcon_h1_family() {
  static const ModelFamily kFamily = {.name = "falcon_h1",
                                      .types = kFalconTypes,
                                      .keys = kFalconKeys,
                                      .eps = 1e-5,
                                      .gguf_keys = kMambaGgufKeys,
                                      .read_json = read_falcon_json,
                                      .read_gguf = read_falcon_gguf,
                                      .write_json = write_falcon_json,
                                      .write_gguf = write_falcon_gguf,
                                      .decoder = falcon_decoder,
                                      .gguf_names = kFalconGgufNames,
                                      .tensor_names = kFalconNames,
                                      .recipes = falcon_recipes};
  return kFamily;
}

}  // namespace eadem::models
