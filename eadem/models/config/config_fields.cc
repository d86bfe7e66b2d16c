// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/config/config_fields.h"

#include <algorithm>

namespace eadem::models {

namespace {

// A configuration of no model, in which everything is switched on that a family may have, or nothing: writers leave out
// keys of what is off.
ModelConfig probe(const ModelFamily& family, std::string_view model_type, bool everything) {
  ModelConfig c;
  c.model_type = model_type;
  c.vocab_size = c.hidden_size = c.intermediate_size = c.max_position_embeddings = 64;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 16;
  c.rotary_dim = everything ? 8 : 16;
  c.num_hidden_layers = 4;
  c.layer_windows.assign(4, 0);
  c.layer_chunks.assign(4, 0);
  c.layer_pattern = "***-";
  // Families of experts and of Mamba layers refuse a configuration without these.
  c.moe_intermediate_size = c.shared_expert_intermediate_size = 16;
  c.mamba.heads = c.mamba.head_dim = c.mamba.state = 8;
  c.rope_theta = 10000.5, c.local_rope_theta = 10000.5, c.pooled_rope_theta = 10000.5;
  for (const ConfigKey& key : family.keys) c.*key.member = 0.5;
  if (!everything) return c;
  c.layer_windows[0] = c.layer_chunks[0] = 8;
  c.layer_pattern = "M*E-";
  c.rope_scaling.kind = modules::RopeScaling::Kind::yarn;
  c.rope_scaling.factor = 2.5;
  c.rope_scaling.original_max_positions = 32;
  c.attention_softcap = c.logit_softcap = 30.5;
  c.clip_qkv = 0.5;
  c.num_experts = 8, c.num_experts_per_tok = 2;
  c.router_aux_loss_coef = 0.5;
  c.kv_lora_rank = c.q_lora_rank = c.qk_nope_head_dim = c.v_head_dim = 8;
  c.index_n_heads = c.index_head_dim = c.index_topk = 2;
  c.moe_latent_size = 8;
  c.global_head_dim = 32, c.num_global_key_value_heads = 1, c.layer_input_size = 8;
  c.nope_layers = {1};
  c.linear_layers = {0};
  c.linear_key_heads = c.linear_value_heads = c.linear_key_dim = c.linear_value_dim = c.linear_taps = 4;
  c.bos_token_id = {0}, c.eos_token_id = {0, 1};
  c.checkpoint_dtype = DType::bf16;
  return c;
}

bool states_something_else(const ModelConfig& config, const io::JsonMember& member) {
  for (const auto& [name, value] : {std::pair<std::string_view, int64_t>{"head_dim", config.head_dim},
                                    {"intermediate_size", config.intermediate_size},
                                    {"num_key_value_heads", config.num_key_value_heads}})
    if (member.key == name) return !(member.value == io::JsonValue(value));
  return false;
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Returns the beginning of `python_class` that spells `name`, apart from capitals and underscores; empty if none does.
std::string_view spelling_in(std::string_view python_class, std::string_view name) {
  size_t at = 0;
  for (const char c : name) {
    if (c == '_') continue;
    while (at < python_class.size() && python_class[at] == '_') ++at;
    if (at == python_class.size() || lower(python_class[at++]) != c) return {};
  }
  return python_class.substr(0, at);
}

}  // namespace

std::string config_class_name(const ModelFamily& family) {
  for (const ModelType& type : family.types)
    if (const std::string_view name = spelling_in(type.python_class, family.name); !name.empty())
      return std::string(name) + "Config";
  std::string name;
  for (size_t i = 0; i < family.name.size(); ++i) {
    if (family.name[i] == '_') continue;
    const bool begins = (i == 0 || family.name[i - 1] == '_') && family.name[i] >= 'a' && family.name[i] <= 'z';
    name += static_cast<char>(begins ? family.name[i] - 'a' + 'A' : family.name[i]);
  }
  return name + "Config";
}

std::vector<ConfigField> config_fields(const ModelFamily& family) {
  std::vector<ConfigField> fields;
  const auto add = [&](const ModelConfig& config, const io::JsonMember& member) {
    auto field = std::find_if(fields.begin(), fields.end(), [&](const ConfigField& f) { return f.name == member.key; });
    if (field == fields.end()) field = fields.insert(field, ConfigField{.name = member.key, .kinds = {}});
    std::vector<io::JsonValue::Kind>& kinds = field->kinds;
    if (std::find(kinds.begin(), kinds.end(), member.value.kind()) == kinds.end()) kinds.push_back(member.value.kind());
    field->own |= states_something_else(config, member);
  };
  for (const ModelType& type : family.types)
    for (const bool everything : {true, false}) {
      ModelConfig config = probe(family, type.name, everything);
      // Scaling of layers with a window may be stated by a key in the place of others.
      for (const modules::RopeScaling& local : {modules::RopeScaling(), config.rope_scaling}) {
        config.local_rope_scaling = local;
        const io::JsonValue json = config.describe();
        for (const io::JsonMember& member : json.as_object()) add(config, member);
      }
    }
  return fields;
}

}  // namespace eadem::models
