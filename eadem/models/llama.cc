// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/llama.h"

#include <cmath>

namespace eadem::models {

using pipeline::Graph;

namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

}  // namespace

Llama::Llama(LlamaConfig config) : config_(std::move(config)) {
  info_ = {.architecture = config_.model_type,
           .vocab = config_.vocab_size,
           .hidden = config_.hidden_size,
           .layers = config_.num_hidden_layers,
           .heads = config_.num_attention_heads,
           .kv_heads = config_.num_key_value_heads,
           .head_dim = config_.head_dim,
           .max_positions = config_.max_position_embeddings,
           .bos_token_ids = config_.bos_token_id,
           .eos_token_ids = config_.eos_token_id};
}

modules::ModelSpec Llama::spec() const {
  return {.hidden = config_.hidden_size,
          .ffn = config_.intermediate_size,
          .layers = config_.num_hidden_layers,
          .heads = config_.num_attention_heads,
          .kv_heads = config_.num_key_value_heads,
          .head_dim = config_.head_dim,
          .vocab = config_.vocab_size,
          .num_parameters = config_.num_parameters()};
}

ValueId Llama::build_decoder(BuildContext& context) const {
  const Graph::Scope model(context.graph, "model");
  const auto scoped = [&](const std::string& name, int layer, auto&& build) {
    const Graph::Scope scope(context.graph, name, layer);
    return build();
  };
  const modules::RopeConfig rope{.theta = config_.rope_theta,
                                 .rotary_dim = config_.rotary_dim,
                                 .style = config_.rope_style,
                                 .scaling = config_.rope_scaling,
                                 .divisors = config_.rope_divisors};
  context.step.rope_table = scoped("rotary_emb", -1, [&] { return modules::Rope(rope).build_table(context); });

  ValueId x = scoped("embed_tokens", -1, [&] {
    return modules::Embedding(config_.vocab_size, config_.hidden_size).build(context, context.step.token_ids);
  });
  for (int layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const modules::DecoderLayer::Config layer_config{
        .attention = {.hidden = config_.hidden_size,
                      .heads = config_.num_attention_heads,
                      .kv_heads = config_.num_key_value_heads,
                      .head_dim = config_.head_dim,
                      .scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim)),
                      .qkv_bias = config_.attention_bias,
                      .out_bias = config_.attention_out_bias,
                      .qk_norm_eps = config_.qk_norm ? std::optional(config_.rms_norm_eps) : std::nullopt,
                      .window = config_.layer_windows[static_cast<size_t>(layer)],
                      .rope = rope},
        .mlp = {.hidden = config_.hidden_size,
                .ffn = config_.intermediate_size,
                .activation = config_.hidden_act,
                .bias = config_.mlp_bias},
        .norm_eps = config_.rms_norm_eps};
    x = scoped("layers." + std::to_string(layer), layer,
               [&] { return modules::DecoderLayer(layer_config, layer).build(context, x); });
  }
  return scoped("norm", -1,
                [&] { return modules::RmsNorm(config_.hidden_size, config_.rms_norm_eps).build(context, x); });
}

ValueId Llama::build_head(BuildContext& context, ValueId hidden) const {
  const Graph::Scope scope(context.graph, "lm_head");
  const std::string weight = config_.tie_word_embeddings ? kEmbedding : kHead;
  return modules::LmHead(config_.vocab_size, config_.hidden_size, weight, config_.tie_word_embeddings)
      .build(context, hidden);
}

std::string gguf_name(const std::string& parameter) {
  struct Rename {
    std::string_view ours, gguf;
  };
  constexpr Rename kGlobal[] = {{"model.embed_tokens.weight", "token_embd.weight"},
                                {"model.norm.weight", "output_norm.weight"},
                                {"lm_head.weight", "output.weight"}};
  constexpr Rename kInLayer[] = {{"input_layernorm.", "attn_norm."},    {"post_attention_layernorm.", "ffn_norm."},
                                 {"self_attn.q_proj.", "attn_q."},      {"self_attn.k_proj.", "attn_k."},
                                 {"self_attn.v_proj.", "attn_v."},      {"self_attn.o_proj.", "attn_output."},
                                 {"self_attn.q_norm.", "attn_q_norm."}, {"self_attn.k_norm.", "attn_k_norm."},
                                 {"mlp.gate_proj.", "ffn_gate."},       {"mlp.up_proj.", "ffn_up."},
                                 {"mlp.down_proj.", "ffn_down."}};
  for (const Rename& rename : kGlobal)
    if (parameter == rename.ours) return std::string(rename.gguf);
  constexpr std::string_view kLayers = "model.layers.";
  if (parameter.starts_with(kLayers)) {
    const size_t dot = parameter.find('.', kLayers.size());
    const std::string layer = parameter.substr(kLayers.size(), dot - kLayers.size());
    const std::string_view rest = std::string_view(parameter).substr(dot + 1);
    for (const Rename& rename : kInLayer)
      if (rest.starts_with(rename.ours))
        return fmt::format("blk.{}.{}{}", layer, rename.gguf, rest.substr(rename.ours.size()));
  }
  throw InvalidArgument("'{}' has no GGUF name", parameter);
}

std::vector<std::string> Llama::checkpoint_names(const std::string& parameter) const {
  if (config_.gguf_names) return {gguf_name(parameter)};
  // Programs that save a tied matrix once keep either of its names.
  if (config_.tie_word_embeddings && parameter == kEmbedding) return {kEmbedding, kHead};
  return {parameter};
}

bool Llama::may_ignore(const std::string& tensor) const {
  return tensor.ends_with("rotary_emb.inv_freq") || tensor == "rope_freqs.weight" ||
         (config_.tie_word_embeddings && tensor == kHead);
}

}  // namespace eadem::models
