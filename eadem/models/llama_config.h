// SPDX-License-Identifier: Apache-2.0
//
// LlamaConfig: the configuration of the Llama family, which differs in a handful of switches. Read from config.json of
// the model types llama (Llama 2, 3.x, SmolLM2), mistral, qwen2, qwen3, or from GGUF metadata of the same
// architectures.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/modules/modules.h"

namespace eadem::models {

struct LlamaConfig {
  std::string model_type = "llama";
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
  modules::RopeScaling rope_scaling;
  std::vector<double> rope_divisors;  // GGUF `rope_freqs.weight`: each frequency is divided by its own; empty: none
  int64_t rotary_dim = 0;             // == head_dim unless partial
  kernels::RopeStyle rope_style = kernels::RopeStyle::rotate_half;
  bool attention_bias = false;      // q, k and v have biases
  bool attention_out_bias = false;  // o has a bias
  bool mlp_bias = false;
  bool qk_norm = false;
  bool tie_word_embeddings = false;
  std::vector<int64_t> layer_windows;  // attention window of each layer; 0: unlimited
  std::vector<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_id;
  std::optional<DType> checkpoint_dtype;  // the dtype in the config, for models without files
  bool gguf_names = false;                // the checkpoint's tensors are named as in GGUF files

  // Elements of one token's keys (or values) in one layer.
  int64_t kv_dim() const { return num_key_value_heads * head_dim; }
  int64_t num_parameters() const;

  // Checks that the fields fit together. Throws InvalidArgument naming `source`, the fields and their values.
  void validate(const std::string& source) const;

  // Throws DataCorrupted for a malformed config, Unsupported naming every key that is not honoured.
  static LlamaConfig from_json(const io::JsonReader& config);
  static LlamaConfig from_gguf(const io::GgufFile& file);
  // A config.json that from_json reads back as an equal config. Throws Unsupported for what the config.json of this
  // model type cannot state but a GGUF file can: interleaved rope, divisors, other biases, norms or windows.
  io::JsonValue to_json() const;
  // The configuration for people to read: it leaves out what a config.json cannot state, and does not throw.
  io::JsonValue describe() const;

  friend bool operator==(const LlamaConfig& a, const LlamaConfig& b) = default;
};

}  // namespace eadem::models
