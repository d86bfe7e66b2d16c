// SPDX-License-Identifier: Apache-2.0
//
// ModelConfig: what a config.json or the metadata of a GGUF file says of a decoder, in one vocabulary for all families
// (models/family.h). A family reads and writes what is its own; the rest is read and written here.
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/modules/modules.h"

namespace eadem::models {

struct ModelFamily;

// The tensors of GGUF files that hold longrope's factors.
inline constexpr std::string_view kLongFactors = "rope_factors_long.weight",
                                  kShortFactors = "rope_factors_short.weight";

// Mamba-2 mixers (modules/hybrid/mamba2.h). 0 heads: there are none.
struct MambaConfig {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t groups = 1;
  int64_t state = 0;
  int64_t taps = 4;
  bool conv_bias = true;
  bool in_bias = false;
  bool out_bias = false;
  bool norm = true;
  bool norm_before_gate = false;
  double dt_min = 0;
  double dt_max = std::numeric_limits<double>::infinity();
  std::array<double, 5> multipliers = {1, 1, 1, 1, 1};  // of z, x, b, c and dt

  int64_t inner() const { return heads * head_dim; }
  friend bool operator==(const MambaConfig& a, const MambaConfig& b) = default;
};

struct ModelConfig {
  std::string model_type;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  kernels::ActivationKind hidden_act = kernels::ActivationKind::silu;
  double rope_theta = 10000.0;
  double local_rope_theta = 0;  // of layers with a window, which have a scaling of their own then; 0: rope_theta
  modules::RopeScaling rope_scaling;
  modules::RopeScaling local_rope_scaling;  // of layers with a window; none while they have no theta of their own
  std::vector<double> rope_divisors;  // GGUF `rope_freqs.weight`: each frequency is divided by its own; empty: none
  int64_t rotary_dim = 0;             // == head_dim unless partial
  kernels::RopeStyle rope_style = kernels::RopeStyle::rotate_half;
  bool attention_bias = false;       // q, k and v have biases
  bool attention_out_bias = false;   // o has a bias
  double query_pre_attn_scalar = 0;  // its root divides q . k; 0: head_dim
  double attention_multiplier = 0;   // factor on q . k; 0: query_pre_attn_scalar says it
  bool scores_per_layer = false;     // q . k of layer N is divided by N + 1
  double attention_softcap = 0;      // of scores; 0: none
  double clip_qkv = 0;               // limit of the elements of q, k and v, before they rotate; 0: none
  bool mlp_bias = false;
  bool qk_norm = false;
  bool parallel_residual = false;  // attention and MLP read the same
  double embedding_multiplier = 1;
  double residual_multiplier = 1;  // of what attention and MLP add
  double logits_scaling = 1;       // divides the logits
  double logit_scale = 1;          // multiplies them
  double logit_softcap = 0;        // 0: none
  bool tie_word_embeddings = false;
  std::vector<int64_t> layer_windows;  // attention window of each layer; 0: unlimited
  std::vector<int64_t> layer_chunks;   // tokens see those of their chunk of so many; 0: no chunks; empty: in no layer
  std::vector<int64_t> nope_layers;    // those that rotate nothing, in order
  // Queries of nope_layers are multiplied by 1 + attn_scale * ln(1 + floor((position + 1) / floor_scale)).
  bool attn_temperature_tuning = false;
  double attn_scale = 0, floor_scale = 0;
  // Mixtures of experts, in the MLP of the layers that has_experts names; 0 experts: in none.
  int64_t num_experts = 0;
  int64_t identity_experts = 0;  // further ones, which give what they read
  int64_t num_experts_per_tok = 0;
  int64_t moe_intermediate_size = 0;  // of one expert
  bool norm_topk_prob = false;        // weights of a token's experts are divided by their sum
  int64_t decoder_sparse_step = 1;    // every so many layers have experts
  std::vector<int64_t> mlp_only_layers;
  int64_t shared_expert_intermediate_size = 0;    // of all experts together that compute every token; 0: there are none
  int64_t n_group = 1, topk_group = 1;            // a token's experts are of so many groups
  double routed_scaling_factor = 1;               // on the weights of a token's experts
  double swiglu_limit = 7, swiglu_alpha = 1.702;  // of experts with a limited SwiGLU
  double moe_norm_min = 0;                        // least sum that these are divided by
  double router_aux_loss_coef = 0;                // on the load-balancing loss in training; 0: it is off
  // Latent attention; head_dim is then qk_nope_head_dim and rotary_dim together. 0: attention of keys and values.
  int64_t kv_lora_rank = 0;
  int64_t q_lora_rank = 0;  // 0: queries have no latent
  int64_t qk_nope_head_dim = 0;
  int64_t v_head_dim = 0;
  // The indexer that selects the tokens that attention sees. 0 heads: there is none.
  int64_t index_n_heads = 0, index_head_dim = 0, index_topk = 0;
  int64_t moe_latent_size = 0;  // width of what experts read and write; 0: hidden_size
  // Layers of full attention beside layers with windows, where those have heads of their own; 0: all are alike.
  int64_t global_head_dim = 0;
  int64_t num_global_key_value_heads = 0;
  int64_t rotated_pairs = 0;         // of their heads, the first ones
  bool keys_are_values = false;      // in these layers
  int64_t num_kv_shared_layers = 0;  // so many last layers read the keys and values of earlier ones
  bool double_wide_mlp = false;      // in those layers
  int64_t layer_input_size = 0;      // what a layer reads of a token besides its hidden state; 0: nothing
  int64_t layer_input_vocab = 0;     // tokens that have it
  MambaConfig mamba;
  // A letter for each layer where they are of several kinds: 'M' Mamba-2, 'C' a gated convolution, '*' attention, '-'
  // MLP, 'E' experts. Empty: all are alike.
  std::string layer_pattern;
  // Gated short convolutions in the layers that layer_pattern calls 'C'.
  int64_t conv_taps = 0;
  bool conv_bias = false;
  // Multipliers of mixers that stand side by side: of what each reads, of keys, of what each writes; and of MLPs.
  double attention_in_multiplier = 1, attention_out_multiplier = 1, key_multiplier = 1;
  double ssm_in_multiplier = 1, ssm_out_multiplier = 1;
  double mlp_gate_multiplier = 1, mlp_down_multiplier = 1;
  // Linear attention with the gated delta rule, in these layers, in order; elsewhere attention. None: nowhere.
  std::vector<int64_t> linear_layers;
  int64_t linear_key_heads = 0;
  int64_t linear_value_heads = 0;
  int64_t linear_key_dim = 0;
  int64_t linear_value_dim = 0;
  int64_t linear_taps = 0;          // of the convolutions before it
  bool linear_heads_tiled = false;  // value heads of one key head stand linear_key_heads apart
  // Attention over a window and pooled rows, of `indexed_stride` tokens and chosen by an indexer in the layers that
  // layer_pattern calls 'I', of `pooled_stride` tokens in those that it calls 'H'; those called 'W' have no rows. Rows
  // have rope_scaling and a theta of their own, which is that of queries and keys in their layers, too.
  int64_t indexed_stride = 0, pooled_stride = 0;
  double pooled_rope_theta = 0;
  int64_t output_groups = 0, output_rank = 0;  // of its output: groups of heads, and what each gives
  std::vector<int64_t> hash_layers;            // layers whose experts a token's number says, in order
  // Hyper-connections; 0 streams: there are none.
  int64_t streams = 0, stream_iterations = 0;
  double stream_eps = 0;
  std::vector<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_id;
  std::optional<DType> checkpoint_dtype;  // the dtype in the config, for models without files

  // The family of model_type. Throws Unsupported naming the model types that there are.
  const ModelFamily& family() const;

  bool has_experts(int64_t layer) const;
  bool is_linear(int64_t layer) const;
  bool is_hashed(int64_t layer) const;
  // Elements of one token's keys (or values) in one layer. Throws Unsupported where layers differ in this, or keep
  // something else: latents, pooled rows.
  int64_t kv_dim() const;
  int64_t num_parameters() const;

  // Whether the mixer of a layer is Mamba-2.
  bool has_mamba(int64_t layer) const {
    return !layer_pattern.empty() && layer_pattern[static_cast<size_t>(layer)] == 'M';
  }

  // Checks that the fields fit together. Throws InvalidArgument naming `source`, the fields and their values.
  void validate(const std::string& source) const;

  // Throws DataCorrupted for a malformed config, Unsupported for a model type that no family has, and naming every key
  // that is not honoured.
  static ModelConfig from_json(const io::JsonReader& config);
  static ModelConfig from_gguf(const io::GgufFile& file);
  // A config.json that from_json reads back as an equal config. Throws Unsupported for what the config.json of this
  // model type cannot state but a GGUF file can: interleaved rope, divisors, other biases, norms or windows.
  io::JsonValue to_json() const;
  // The configuration for people to read: it leaves out what a config.json cannot state, and does not throw.
  io::JsonValue describe() const;
  // The keys that a GGUF file states it with, without names and tokenizer. Throws Unsupported for what its architecture
  // cannot state.
  io::GgufMetadata to_gguf() const;

  friend bool operator==(const ModelConfig& a, const ModelConfig& b) = default;

 private:
  void validate_mamba(const std::string& source) const;
  void validate_pooled(const std::string& source) const;
};

}  // namespace eadem::models
