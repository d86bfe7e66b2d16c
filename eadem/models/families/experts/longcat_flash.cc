// SPDX-License-Identifier: Apache-2.0
//
// LongCat-Flash: layers of two latent attentions and two MLPs, and beside them experts, which read what the first MLP
// reads and are added behind the second. Experts are chosen by a softmax and a correction among those with weights and
// identities. The latents of queries and of keys and values are scaled by the root of hidden_size over their width.
// The module that predicts a further token has a layer of one latent attention and one MLP.
// Source: transformers, models/longcat_flash; of that module vLLM, models/longcat_flash_mtp.py, and SGLang,
// models/longcat_flash_nextn.py (facts only).
#include <cmath>
#include <cstdlib>

#include "eadem/models/decoders/moe_decoder.h"
#include "eadem/models/family.h"

namespace eadem::models {

namespace {

constexpr ModelType kLongcatTypes[] = {{.name = "longcat_flash",
                                        .gguf_architecture = "",
                                        .python_class = "LongcatFlashForCausalLM",
                                        .max_position_embeddings = 131072,
                                        .head_dim = 64}};

constexpr OwnName kLongcatKeys[] = {{"num_hidden_layers", "num_layers"}, {"intermediate_size", "ffn_hidden_size"}};

constexpr OwnName kLongcatTensors[] = {{"0.input_layernorm.", "input_layernorm.0."},
                                       {"0.self_attn.", "self_attn.0."},
                                       {"0.post_attention_layernorm.", "post_attention_layernorm.0."},
                                       {"0.mlp.", "mlps.0."},
                                       {"1.input_layernorm.", "input_layernorm.1."},
                                       {"1.self_attn.", "self_attn.1."},
                                       {"1.post_attention_layernorm.", "post_attention_layernorm.1."},
                                       {"1.mlp.", "mlps.1."},
                                       {"mlp.gate.e_score_correction_bias", "mlp.router.e_score_correction_bias"},
                                       {"mlp.gate.", "mlp.router.classifier."}};

constexpr OwnName kLongcatMtpNames[] = {{"enorm.", "layers.0.enorm.m."},
                                        {"hnorm.", "layers.0.hnorm.m."},
                                        {"shared_head.norm.", "norm."},
                                        {"mlp.", "layers.0.transformer_layer.mlp."},
                                        {"", "layers.0."}};

// The epsilon of the norms of latents. It does not depend on rms_norm_eps of the configuration.
constexpr double kLatentEps = 1e-6;

// In transformers num_hidden_layers counts the attentions.
int64_t count_longcat_layers(const io::JsonReader& config) {
  const auto layers = config.optional_integer("num_layers", 1, kMaxLayers),
             attentions = config.optional_integer("num_hidden_layers", 1, 2 * kMaxLayers);
  if (!attentions) return layers ? *layers : config.integer("num_layers", 1, kMaxLayers);
  if (*attentions != 2 * layers.value_or(*attentions / 2))
    config.fail("num_hidden_layers",
                layers ? fmt::format("two for each of 'num_layers' {}", *layers) : "an even number");
  return *attentions / 2;
}

void read_longcat_experts(const io::JsonReader& config, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t least, int64_t most, int64_t if_absent) {
    return config.optional_integer(key, least, most).value_or(if_absent);
  };
  result.num_experts = integer("n_routed_experts", 1, kMaxExperts, 512);
  const bool says_none = config.value().find("zero_expert_num") != nullptr;  // null: none
  result.identity_experts = integer("zero_expert_num", 0, kMaxExperts, says_none ? 0 : 256);
  result.num_experts_per_tok = integer("moe_topk", 1, kMaxExperts, 12);
  result.moe_intermediate_size = integer("expert_ffn_hidden_size", 1, kMaxExtent, 2048);
  result.routed_scaling_factor = config.optional_number("routed_scaling_factor", -1e6, 1e6).value_or(6.0);
}

void read_longcat_json(const io::JsonReader& config, ModelConfig& result) {
  const auto width = [&](const char* key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  read_rope_or(config, 1e7, result);
  result.rope_style = kernels::RopeStyle::interleaved;
  result.q_lora_rank = width("q_lora_rank", 1536);
  if (config.value().find("q_lora_rank") != nullptr && !config.has("q_lora_rank"))
    config.fail("q_lora_rank", "an integer: all queries have a latent");
  result.kv_lora_rank = width("kv_lora_rank", 512);
  result.qk_nope_head_dim = width("qk_nope_head_dim", 128);
  result.v_head_dim = width("v_head_dim", 128);
  result.rotary_dim = width("qk_rope_head_dim", 64);
  // transformers makes the rotation's frequencies of one and rotates the other.
  if (result.head_dim != result.rotary_dim)
    throw Unsupported("{}: 'head_dim' is {} and 'qk_rope_head_dim' {}; only equal ones are honoured", config.file(),
                      result.head_dim, result.rotary_dim);
  result.head_dim = result.qk_nope_head_dim + result.rotary_dim;
  if (const int64_t all = width("qk_head_dim", result.head_dim); all != result.head_dim)
    throw Unsupported("{}: 'qk_head_dim' is {}; only qk_nope_head_dim and qk_rope_head_dim together, {}, is honoured",
                      config.file(), all, result.head_dim);
  result.attention_bias = config.optional_boolean("attention_bias").value_or(false);
  result.attention_out_bias = result.attention_bias;
  read_longcat_experts(config, result);
}

void write_longcat_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("rope_parameters", rope_object(config.rope_scaling, config.rope_theta));
  json.set("head_dim", config.rotary_dim).set("attention_bias", config.attention_bias);
  json.set("q_lora_rank", config.q_lora_rank).set("kv_lora_rank", config.kv_lora_rank);
  json.set("qk_nope_head_dim", config.qk_nope_head_dim).set("qk_rope_head_dim", config.rotary_dim);
  json.set("v_head_dim", config.v_head_dim);
  json.set("n_routed_experts", config.num_experts).set("zero_expert_num", config.identity_experts);
  json.set("moe_topk", config.num_experts_per_tok).set("expert_ffn_hidden_size", config.moe_intermediate_size);
  json.set("routed_scaling_factor", config.routed_scaling_factor);
}

// The factor on a latent of this width.
double latent_factor(const ModelConfig& config, int64_t width) {
  return std::sqrt(static_cast<double>(config.hidden_size) / static_cast<double>(width));
}

DecoderSpec longcat_decoder(const ModelConfig& config) {
  const double eps = config.rms_norm_eps;
  modules::MoeMlp::Config experts = experts_of(config);
  experts.route.scale = static_cast<float>(config.routed_scaling_factor);
  experts.correction_bias = true;
  const modules::LayerSpec part{
      .hidden = config.hidden_size,
      .mixer =
          modules::MlaAttention::Config{.hidden = config.hidden_size,
                                        .heads = config.num_attention_heads,
                                        .query_rank = config.q_lora_rank,
                                        .latent_dim = config.kv_lora_rank,
                                        .nope_dim = config.qk_nope_head_dim,
                                        .value_dim = config.v_head_dim,
                                        // Queries are linear in their latent, so that its factor is one of the scores.
                                        .scale = latent_scale_of(config) * latent_factor(config, config.q_lora_rank),
                                        .latent_scale = latent_factor(config, config.kv_lora_rank),
                                        .bias = config.attention_bias,
                                        .norm_eps = kLatentEps,
                                        .rope = {.theta = config.rope_theta,
                                                 .rotary_dim = config.rotary_dim,
                                                 .style = config.rope_style,
                                                 .scaling = config.rope_scaling}},
      .mlp =
          modules::DenseMlp::Config{
              .hidden = config.hidden_size, .ffn = config.intermediate_size, .activation = config.hidden_act},
      .before_mixer = modules::NormSpec{"input_layernorm", eps},
      .before_mlp = modules::NormSpec{"post_attention_layernorm", eps}};
  DecoderSpec spec{.vocab = config.vocab_size,
                   .hidden = config.hidden_size,
                   .norm = {"norm", eps},
                   .tied = config.tie_word_embeddings};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    spec.layers.push_back(
        config.has_experts(layer)
            ? modules::LayerSpec{.hidden = config.hidden_size, .parts = {part, part}, .shortcut = experts}
            : part);
  return spec;
}

// A layer without experts, of which a model has none.
void add_longcat_mtp_layer(ModelConfig& config) {
  config.mlp_only_layers.push_back(config.num_hidden_layers++);
  config.layer_windows.push_back(0);
}

// Files have a matrix for each expert.
std::vector<WeightRecipe> longcat_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                          CheckpointFormat format) {
  const ParameterInfo own{huggingface_name(parameter.name, config.family()), parameter.shape};
  if (auto latent = latent_recipes(config, own, format); !latent.empty()) return latent;
  std::vector<WeightRecipe> experts = expert_recipes(config, own, format);
  if (!experts.empty()) experts.resize(1);
  return experts;
}

// transformers makes gate and up of identities as well, and never reads them.
bool ignores_longcat(const ModelConfig& config, const std::string& tensor) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t at = tensor.find(kExperts);
  return at != std::string::npos && std::atoll(tensor.c_str() + at + kExperts.size()) >= config.num_experts;
}

}  // namespace

const ModelFamily& longcat_flash_family() {
  static const ModelFamily kFamily = {.name = "longcat_flash",
                                      .types = kLongcatTypes,
                                      .latent_attention = true,
                                      .eps = 1e-5,
                                      .json_names = kLongcatKeys,
                                      .count_layers = count_longcat_layers,
                                      .read_json = read_longcat_json,
                                      .write_json = write_longcat_json,
                                      .decoder = longcat_decoder,
                                      .tensor_names = kLongcatTensors,
                                      .ignored_module = "model.mtp.",
                                      .recipes = longcat_recipes,
                                      .may_ignore = ignores_longcat,
                                      .mtp = ModelFamily::Mtp::own_module,
                                      .add_mtp_layers = add_longcat_mtp_layer,
                                      .mtp_module = "model.mtp",
                                      .mtp_names = kLongcatMtpNames};
  return kFamily;
}

}  // namespace eadem::models
