// SPDX-License-Identifier: Apache-2.0
//
// Nemotron-H: each layer is one of Mamba-2, attention that rotates nothing, an MLP of squared ReLUs, or experts of such
// MLPs, which may read a narrower projection. Time steps have a least length, in every step here; transformers forgets
// it in decode steps. The layers that predict a further token, attention and experts, are MtpModel's.
// Source: transformers, models/nemotron_h; llama.cpp, conversion/nemotron.py and src/models/nemotron-h.cpp (facts
// only).
#include <numeric>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/decoders/mamba_layers.h"
#include "eadem/models/decoders/moe_decoder.h"

namespace eadem::models {

namespace {

constexpr ModelType kNemotronTypes[] = {{.name = "nemotron_h",
                                         .gguf_architecture = "nemotron_h",
                                         .python_class = "NemotronHForCausalLM",
                                         .max_position_embeddings = 4096,
                                         .num_key_value_heads = 8,
                                         .head_dim = 128},
                                        {.name = "nemotron_h",
                                         .gguf_architecture = "nemotron_h_moe",
                                         .python_class = "NemotronHForCausalLM",
                                         .max_position_embeddings = 4096,
                                         .num_key_value_heads = 8,
                                         .head_dim = 128}};

constexpr OwnName kNemotronKeyNames[] = {{"rms_norm_eps", "layer_norm_epsilon"}, {"num_hidden_layers", ""}};
constexpr OwnName kNemotronNames[] = {{"model.layers.", "backbone.layers."},
                                      {"model.embed_tokens.weight", "backbone.embeddings.weight"},
                                      {"model.norm.weight", "backbone.norm_f.weight"},
                                      {"input_layernorm.", "norm."},
                                      {"self_attn.", "mixer."},
                                      {"mlp.", "mixer."}};
constexpr GgufName kNemotronGgufNames[] = {{"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
                                           {"mlp.shared_experts.up_proj.", "ffn_up_shexp."},
                                           {"mlp.shared_experts.down_proj.", "ffn_down_shexp."},
                                           {"mlp.fc1_latent_proj.", "ffn_latent_down."},
                                           {"mlp.fc2_latent_proj.", "ffn_latent_up."}};

constexpr MambaKeys kNemotronMambaKeys = {.heads = "mamba_num_heads",
                                          .groups = "n_groups",
                                          .state = "ssm_state_size",
                                          .taps = "conv_kernel",
                                          .conv_bias = "use_conv_bias",
                                          .if_absent = {.heads = 128, .groups = 8, .state = 128}};
constexpr double kTimeStepMin = 0.001;  // of a config.json that does not state it, and of GGUF files, which cannot

bool has_any(const ModelConfig& config, char kind) { return config.layer_pattern.find(kind) != std::string::npos; }

// `layers_block_type`, or the letters of transformers 4.
std::string pattern_of(const io::JsonReader& config) {
  const std::optional<std::string> letters = config.optional_string("hybrid_override_pattern");
  if (const std::optional<std::string> kinds = read_layer_pattern(config)) return *kinds;
  const std::string pattern = letters.value_or("ME*-");
  if (pattern.empty() || static_cast<int64_t>(pattern.size()) > kMaxLayers ||
      pattern.find_first_not_of("M*-E") != std::string::npos)
    config.fail("hybrid_override_pattern", "letters M, *, - and E, one per layer");
  return pattern;
}

int64_t count_nemotron_layers(const io::JsonReader& config) {
  config.ignore("num_hidden_layers", "is the length of the pattern of layers");
  const auto layers = static_cast<int64_t>(pattern_of(config).size());
  if (layers < 1 || layers > kMaxLayers) config.fail("layers_block_type", "one kind for each layer");
  return layers;
}

void set_nope(ModelConfig& config) {
  config.nope_layers.resize(static_cast<size_t>(config.num_hidden_layers));
  std::iota(config.nope_layers.begin(), config.nope_layers.end(), int64_t{0});
}

void read_nemotron_experts(const io::JsonReader& config, ModelConfig& result) {
  const auto integer = [&](const char* key, int64_t if_absent) {
    return config.optional_integer(key, 1, kMaxExtent).value_or(if_absent);
  };
  ModelConfig read;
  read_experts(config, {.count_key = "n_routed_experts", .count = 8, .per_token = 2, .ffn = 7688}, read);
  read.shared_expert_intermediate_size = integer("moe_shared_expert_intermediate_size", 7688);
  read.moe_latent_size = integer("moe_latent_size", 0);
  read.routed_scaling_factor = config.optional_number("routed_scaling_factor", 1e-6, 1e6).value_or(1.0);
  read.norm_topk_prob = config.boolean_or("norm_topk_prob", true);
  read.n_group = integer("n_group", 1);
  read.topk_group = integer("topk_group", 1);
  if (!has_any(result, 'E')) return;
  result.num_experts = read.num_experts;
  result.num_experts_per_tok = read.num_experts_per_tok;
  result.moe_intermediate_size = read.moe_intermediate_size;
  result.shared_expert_intermediate_size = read.shared_expert_intermediate_size;
  result.moe_latent_size = read.moe_latent_size;
  result.routed_scaling_factor = read.routed_scaling_factor;
  result.norm_topk_prob = read.norm_topk_prob;
  result.n_group = read.n_group;
  result.topk_group = read.topk_group;
}

void read_nemotron_json(const io::JsonReader& config, ModelConfig& result) {
  const auto refuse_true = [&](const char* key) {
    if (config.optional_boolean(key).value_or(false))
      throw Unsupported("{}: '{}' is true; only false is honoured for {}", config.file(), key, result.model_type);
  };
  refuse_true("attention_bias");
  if (config.has("sliding_window")) throw Unsupported("{}: 'sliding_window' is not honoured", config.file());
  config.ignore("sliding_window");
  if (const auto name = config.optional_string("mamba_hidden_act"); name.value_or("silu") != "silu")
    throw Unsupported("{}: 'mamba_hidden_act' is \"{}\"; only silu is honoured", config.file(), *name);
  // An old name, which is read where the other is not there.
  if (const auto head_dim = config.optional_integer("attention_head_dim", 1, 65536);
      head_dim && !config.has("head_dim"))
    result.head_dim = result.rotary_dim = *head_dim;
  result.layer_pattern = pattern_of(config);
  set_nope(result);
  result.mlp_bias = config.optional_boolean("mlp_bias").value_or(false);
  MambaConfig& mamba = result.mamba;
  read_mamba(config, kNemotronMambaKeys, mamba);
  mamba.head_dim = config.optional_integer("mamba_head_dim", 1, kMaxExtent).value_or(64);
  mamba.in_bias = mamba.out_bias = config.optional_boolean("use_bias").value_or(false);
  mamba.dt_min = config.optional_number("time_step_min", 0.0, 1e6).value_or(kTimeStepMin);
  read_nemotron_experts(config, result);
}

void write_nemotron_json(const ModelConfig& config, io::JsonValue& json) {
  json.set("layers_block_type", layer_kinds_of(config.layer_pattern));
  json.set("attention_bias", false).set("mlp_bias", config.mlp_bias);
  write_mamba(config.mamba, kNemotronMambaKeys, json);
  json.set("mamba_head_dim", config.mamba.head_dim).set("use_bias", config.mamba.in_bias);
  json.set("time_step_min", config.mamba.dt_min);
  if (!has_any(config, 'E')) return;
  write_experts(config, "n_routed_experts", json);
  json.set("moe_shared_expert_intermediate_size", config.shared_expert_intermediate_size);
  json.set("moe_latent_size", config.moe_latent_size > 0 ? io::JsonValue(config.moe_latent_size) : io::JsonValue());
  json.set("routed_scaling_factor", config.routed_scaling_factor).set("norm_topk_prob", config.norm_topk_prob);
  json.set("n_group", config.n_group).set("topk_group", config.topk_group);
}

void read_nemotron_gguf(const io::GgufFile& file, const std::string& prefix, ModelConfig& result) {
  read_biases(file, prefix, result);
  const auto integer = [&](const char* key) { return file.optional_integer(prefix + key, 0, kMaxExtent).value_or(0); };
  result.num_experts = integer("expert_count");
  const std::vector<int64_t> heads = file.integers(prefix + "attention.head_count_kv", 0, 65536),
                             widths = file.integers(prefix + "feed_forward_length", 0, kMaxExtent);
  for (size_t layer = 0; layer < heads.size() && layer < widths.size(); ++layer) {
    const char mlp = file.find(fmt::format("blk.{}.ffn_gate_inp.weight", layer)) != nullptr ? 'E' : '-';
    result.layer_pattern += heads[layer] > 0 ? '*' : widths[layer] > 0 ? mlp : 'M';
    result.mlp_bias = result.mlp_bias || file.find(fmt::format("blk.{}.ffn_up.bias", layer)) != nullptr;
  }
  set_nope(result);
  read_mamba_gguf(file, prefix, result.mamba);
  result.mamba.dt_min = kTimeStepMin;
  if (!has_any(result, 'E')) result.num_experts = 0;
  if (result.num_experts == 0) return;
  result.num_experts_per_tok = integer("expert_used_count");
  result.moe_intermediate_size = integer("expert_feed_forward_length");
  result.shared_expert_intermediate_size = integer("expert_shared_feed_forward_length");
  result.moe_latent_size = integer("moe_latent_size");
  result.norm_topk_prob = file.optional_boolean(prefix + "expert_weights_norm").value_or(true);
  result.routed_scaling_factor = file.optional_number(prefix + "expert_weights_scale").value_or(1.0);
  result.n_group = std::max<int64_t>(1, integer("expert_group_count"));
  result.topk_group = std::max<int64_t>(1, integer("expert_group_used_count"));
}

void write_nemotron_gguf(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata) {
  const auto add = [&](const char* key, int64_t value) {
    metadata.emplace_back(prefix + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
  };
  const bool moe = has_any(config, 'E');
  if (moe && has_any(config, '-'))
    throw Unsupported("MLPs and experts in one model, which GGUF's nemotron_h_moe architecture cannot state");
  if (moe && config.mlp_bias)
    throw Unsupported("biases beside experts, which GGUF's nemotron_h_moe architecture cannot state");
  const auto counts = [&](const char* key, int64_t value, std::string_view kinds) {
    metadata.emplace_back(prefix + key, layer_counts(config.num_hidden_layers, value, [&](int64_t layer) {
                            return kinds.find(config.layer_pattern[static_cast<size_t>(layer)]) != kinds.npos;
                          }));
  };
  counts("attention.head_count_kv", config.num_key_value_heads, "*");
  counts("feed_forward_length", moe ? config.moe_intermediate_size : config.intermediate_size, "-E");
  write_mamba_gguf(config.mamba, prefix, metadata, kTimeStepMin);
  if (!moe) return;
  add("expert_count", config.num_experts);
  add("expert_used_count", config.num_experts_per_tok);
  add("expert_shared_count", 1);
  add("expert_feed_forward_length", config.moe_intermediate_size);
  add("expert_shared_feed_forward_length", config.shared_expert_intermediate_size);
  add("expert_group_count", config.n_group);
  add("expert_group_used_count", config.topk_group);
  if (config.moe_latent_size > 0) add("moe_latent_size", config.moe_latent_size);
  metadata.emplace_back(prefix + "expert_weights_norm", io::GgufValue::boolean(config.norm_topk_prob));
  metadata.emplace_back(prefix + "expert_weights_scale",
                        io::GgufValue::scalar(static_cast<float>(config.routed_scaling_factor)));
}

std::string_view nemotron_architecture(const ModelConfig& config) {
  return kNemotronTypes[has_any(config, 'E') ? 1 : 0].gguf_architecture;
}

// Experts of the best groups by the sum of their two best, chosen by sigmoids and a correction, as in DeepSeek V3.
modules::MoeMlp::Config nemotron_experts_of(const ModelConfig& config) {
  modules::MoeMlp::Config experts = experts_of(config);
  kernels::RouteAttrs& route = experts.route;
  route.scoring = kernels::RouteAttrs::Scoring::sigmoid;
  route.epsilon = 1e-20f;
  route.scale = static_cast<float>(config.routed_scaling_factor);
  route.groups = config.n_group;
  route.top_groups = config.topk_group;
  route.group_best = config.n_group > 1 ? 2 : 1;
  experts.correction_bias = true;
  experts.gated = false;
  experts.latent = config.moe_latent_size;
  experts.latent_bias = config.mlp_bias;
  experts.shared = {.name = "shared_experts", .ffn = config.shared_expert_intermediate_size, .bias = config.mlp_bias};
  return experts;
}

DecoderSpec nemotron_decoder(const ModelConfig& config) {
  // A layer has one norm, whichever part it stands before.
  DecoderSpec spec = dense_decoder(config, {.before_mlp = "input_layernorm", .gated = false});
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    modules::LayerSpec& own = spec.layers[layer];
    const char kind = config.layer_pattern[layer];
    if (kind == 'M') own.mixer = mamba_of(config);
    if (kind == 'E') own.mlp = nemotron_experts_of(config);
    if (kind == 'M' || kind == '*')
      own.mlp = std::monostate();
    else
      own.mixer = std::monostate();
  }
  return spec;
}

// The only layers that published models have there.
void add_nemotron_mtp_layers(ModelConfig& config) {
  constexpr std::string_view kLayers = "*E";
  if (config.num_experts == 0)
    throw Unsupported(
        "{} has no head for multi-token prediction (MTP) that is computed here beside layers without experts",
        config.model_type);
  config.layer_pattern += kLayers;
  config.num_hidden_layers += std::ssize(kLayers);
  config.layer_windows.resize(static_cast<size_t>(config.num_hidden_layers), 0);
  set_nope(config);
}

std::vector<WeightRecipe> nemotron_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                           CheckpointFormat format) {
  constexpr std::string_view kExperts = "mlp.experts.";
  const LayerName name = layer_name(parameter.name);
  if (format == CheckpointFormat::gguf || !name.rest.starts_with(kExperts))
    return mamba_recipes(config, parameter, format, "backbone.layers.{}.mixer.");
  std::vector<WeightRecipe> experts;
  for (int64_t e = 0; e < config.num_experts; ++e)
    experts.push_back(WeightRecipe::name(
        fmt::format("backbone.layers.{}.mixer.experts.{}.{}", name.number, e, name.rest.substr(kExperts.size()))));
  return {WeightRecipe::stack(std::move(experts))};
}

}  // namespace

const ModelFamily& nemotron_h_family() {
  static const std::string kGgufKeys = fmt::format(
      "{} expert_count expert_used_count expert_shared_count expert_feed_forward_length "
      "expert_shared_feed_forward_length expert_group_count expert_group_used_count expert_weights_norm "
      "expert_weights_scale moe_latent_size",
      kMambaGgufKeys);
  static const ModelFamily kFamily = {.name = "nemotron_h",
                                      .types = kNemotronTypes,
                                      .activation_key = "mlp_hidden_act",
                                      .activation = "relu2",
                                      .eps = 1e-5,
                                      .json_names = kNemotronKeyNames,
                                      .rotates = false,
                                      .gguf_keys = kGgufKeys,
                                      .gguf_architecture = nemotron_architecture,
                                      .gguf_counts_by_layer = true,
                                      .count_layers = count_nemotron_layers,
                                      .read_json = read_nemotron_json,
                                      .read_gguf = read_nemotron_gguf,
                                      .write_json = write_nemotron_json,
                                      .write_gguf = write_nemotron_gguf,
                                      .decoder = nemotron_decoder,
                                      .gguf_names = kNemotronGgufNames,
                                      .tensor_names = kNemotronNames,
                                      .ignored_module = "mtp.",
                                      .recipes = nemotron_recipes,
                                      .further_layers = true,
                                      .mtp = ModelFamily::Mtp::own_layers,
                                      .add_mtp_layers = add_nemotron_mtp_layers};
  return kFamily;
}

}  // namespace eadem::models
