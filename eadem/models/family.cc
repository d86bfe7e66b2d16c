// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/family.h"

#include <utility>

// The families: one line each, and a file of that name in models/families, which defines NAME_family().
#define EADEM_MODEL_FAMILIES(FAMILY) \
  FAMILY(llama)                      \
  FAMILY(gemma2)                     \
  FAMILY(gemma3)                     \
  FAMILY(gemma4)                     \
  FAMILY(phi3)                       \
  FAMILY(olmo)                       \
  FAMILY(smollm3)                    \
  FAMILY(granite)                    \
  FAMILY(starcoder2)                 \
  FAMILY(gpt_neox)                   \
  FAMILY(gpt2)                       \
  FAMILY(cohere2)                    \
  FAMILY(glm4)                       \
  FAMILY(exaone4)                    \
  FAMILY(hunyuan)                    \
  FAMILY(ernie4_5)                   \
  FAMILY(qwen3_moe)                  \
  FAMILY(mixtral)                    \
  FAMILY(qwen2_moe)                  \
  FAMILY(glm4_moe)                   \
  FAMILY(ernie4_5_moe)               \
  FAMILY(gpt_oss)                    \
  FAMILY(olmoe)                      \
  FAMILY(minimax_m2)                 \
  FAMILY(deepseek)                   \
  FAMILY(longcat_flash)              \
  FAMILY(deepseek_v4)                \
  FAMILY(granite_moe)                \
  FAMILY(falcon_h1)                  \
  FAMILY(nemotron_h)                 \
  FAMILY(lfm2)                       \
  FAMILY(qwen3_next)                 \
  FAMILY(qwen3_5)                    \
  FAMILY(kimi_linear)                \
  FAMILY(llama4)

namespace eadem::models {

#define EADEM_DECLARE_FAMILY(name) const ModelFamily& name##_family();
EADEM_MODEL_FAMILIES(EADEM_DECLARE_FAMILY)
#undef EADEM_DECLARE_FAMILY

namespace {

constexpr GgufName kWholeNames[] = {{"model.embed_tokens.weight", "token_embd.weight"},
                                    {"model.embed_positions.weight", "position_embd.weight"},
                                    {"model.norm.weight", "output_norm.weight"},
                                    {"model.norm.bias", "output_norm.bias"},
                                    {"lm_head.weight", "output.weight"},
                                    {"lm_head.bias", "output.bias"},
                                    {"model.hc_head.fn", "output_hc_fn.weight"},
                                    {"model.hc_head.base", "output_hc_base.weight"},
                                    {"model.hc_head.scale", "output_hc_scale.weight"},
                                    {"model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"},
                                    {"model.per_layer_model_projection.weight", "per_layer_model_proj.weight"},
                                    {"model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"}};
constexpr GgufName kLayerNames[] = {{"input_layernorm.", "attn_norm."},
                                    {"post_attention_layernorm.", "ffn_norm."},
                                    {"self_attn.q_proj.", "attn_q."},
                                    {"self_attn.k_proj.", "attn_k."},
                                    {"self_attn.v_proj.", "attn_v."},
                                    {"self_attn.o_proj.", "attn_output."},
                                    {"self_attn.q_norm.", "attn_q_norm."},
                                    {"self_attn.k_norm.", "attn_k_norm."},
                                    {"self_attn.q_a_proj.", "attn_q_a."},
                                    {"self_attn.q_a_layernorm.", "attn_q_a_norm."},
                                    {"self_attn.q_b_proj.", "attn_q_b."},
                                    {"self_attn.kv_a_proj_with_mqa.", "attn_kv_a_mqa."},
                                    {"self_attn.kv_a_layernorm.", "attn_kv_a_norm."},
                                    {"self_attn.k_b_proj.", "attn_k_b."},
                                    {"self_attn.v_b_proj.", "attn_v_b."},
                                    {"self_attn.kv_b_proj.", "attn_kv_b."},
                                    {"mlp.gate_proj.", "ffn_gate."},
                                    {"mlp.up_proj.", "ffn_up."},
                                    {"mlp.down_proj.", "ffn_down."},
                                    {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
                                    {"mlp.gate.", "ffn_gate_inp."},
                                    {"mlp.experts.gate_proj.", "ffn_gate_exps."},
                                    {"mlp.experts.up_proj.", "ffn_up_exps."},
                                    {"mlp.experts.down_proj.", "ffn_down_exps."},
                                    {"mlp.shared_expert.gate_proj.", "ffn_gate_shexp."},
                                    {"mlp.shared_expert.up_proj.", "ffn_up_shexp."},
                                    {"mlp.shared_expert.down_proj.", "ffn_down_shexp."},
                                    {"mlp.shared_experts.gate_proj.", "ffn_gate_shexp."},
                                    {"mlp.shared_experts.up_proj.", "ffn_up_shexp."},
                                    {"mlp.shared_experts.down_proj.", "ffn_down_shexp."},
                                    {"mlp.shared_expert_gate.", "ffn_gate_inp_shexp."},
                                    {"enorm.", "nextn.enorm."},
                                    {"hnorm.", "nextn.hnorm."},
                                    {"eh_proj.", "nextn.eh_proj."},
                                    {"shared_head.norm.", "nextn.shared_head_norm."}};

// The GGUF name of "layers.N." + `rest`; empty if there is none.
std::string name_in_layer(std::string_view layer, std::string_view rest, std::span<const GgufName> names) {
  for (const GgufName& name : names)
    if (rest.starts_with(name.ours)) return fmt::format("blk.{}.{}{}", layer, name.gguf, rest.substr(name.ours.size()));
  return "";
}

// "llama serves model types a, b; gemma3 …", without families that have no names.
template <typename NameOf>
std::string served(std::string_view what, NameOf&& name_of) {
  std::string text;
  for (const ModelFamily* family : families()) {
    std::string names;
    std::string_view last;  // a model type may have several architectures, each in a row
    for (const ModelType& type : family->types) {
      const std::string_view name = std::exchange(last, name_of(type));
      if (!last.empty() && last != name) names += fmt::format("{} {}", names.empty() ? "" : ",", last);
    }
    if (!names.empty()) text += fmt::format("{}{} serves {}{}", text.empty() ? "" : "; ", family->name, what, names);
  }
  return text;
}

}  // namespace

const ModelType* ModelFamily::find_type(std::string_view model_type) const {
  for (const ModelType& type : types)
    if (type.name == model_type) return &type;
  return nullptr;
}

std::string_view ModelFamily::json_name(std::string_view usual) const {
  for (const OwnName& name : json_names)
    if (name.usual == usual) return name.own;
  return usual;
}

std::span<const ModelFamily* const> families() {
#define EADEM_LIST_FAMILY(name) &name##_family(),
  static const ModelFamily* const kFamilies[] = {EADEM_MODEL_FAMILIES(EADEM_LIST_FAMILY)};
#undef EADEM_LIST_FAMILY
  return kFamilies;
}

const ModelFamily& family_of_type(std::string_view model_type, const std::string& source) {
  for (const ModelFamily* family : families())
    if (family->find_type(model_type) != nullptr) return *family;
  throw Unsupported("{}: model type '{}': {}", source, model_type,
                    served("model types", [](const ModelType& type) { return type.name; }));
}

const ModelFamily& family_of_gguf(std::string_view architecture, bool has_experts, const std::string& source) {
  const ModelFamily* found = nullptr;
  for (const ModelFamily* family : families())
    for (const ModelType& type : family->types)
      if (!architecture.empty() && type.gguf_architecture == architecture && (has_experts || !type.gguf_experts) &&
          (found == nullptr || type.gguf_experts))
        found = family;
  if (found != nullptr) return *found;
  throw Unsupported("{}: architecture '{}': {}", source, architecture,
                    served("architectures", [](const ModelType& type) { return type.gguf_architecture; }));
}

std::string huggingface_name(const std::string& parameter, const ModelFamily& family) {
  constexpr std::string_view kLayers = "model.layers.";
  const bool in_layer = parameter.starts_with(kLayers);
  const size_t rest = in_layer ? parameter.find('.', kLayers.size()) + 1 : 0;
  std::string head = parameter.substr(0, rest), tail = parameter.substr(rest);
  for (const OwnName& name : family.tensor_names) {
    if (name.usual == kLayers)
      head = head.empty() ? head : std::string(name.own) + head.substr(kLayers.size());
    else if (in_layer ? tail.starts_with(name.usual) : tail == name.usual)
      return head + std::string(name.own) + tail.substr(name.usual.size());
  }
  return head + tail;
}

std::string gguf_name(const std::string& parameter, const ModelFamily* family) {
  for (const GgufName& name : kWholeNames)
    if (parameter == name.ours) return std::string(name.gguf);
  constexpr std::string_view kLayers = "model.layers.";
  if (parameter.starts_with(kLayers)) {
    const size_t dot = parameter.find('.', kLayers.size());
    const std::string_view layer = std::string_view(parameter).substr(kLayers.size(), dot - kLayers.size());
    const std::string_view rest = std::string_view(parameter).substr(dot + 1);
    std::string name = family != nullptr ? name_in_layer(layer, rest, family->gguf_names) : "";
    if (name.empty()) name = name_in_layer(layer, rest, kLayerNames);
    if (!name.empty()) return name;
  }
  throw InvalidArgument("'{}' has no GGUF name", parameter);
}

}  // namespace eadem::models
