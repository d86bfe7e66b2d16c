// SPDX-License-Identifier: Apache-2.0
//
// The shapes of real models, from which the workload rows of every op are made.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/tensor_type.h"

namespace eadem::ops {

struct ModelShape {
  std::string_view name;
  int64_t hidden, ffn, layers, heads, kv_heads, head_dim, vocab;
  DType dtype;            // dtype of weights and activations
  bool qkv_bias = false;  // q, k and v have biases
  bool qk_norm = false;   // norms of q and k, per head
};

// From the models' config.json files; `tiny` is the size of the golden models in tests/data.
std::span<const ModelShape> model_shapes();

// The experts of a model that has them.
struct ExpertShape {
  std::string_view name;
  int64_t hidden, ffn, experts, top_k;
  DType dtype;        // of weights and activations
  bool bias = false;  // experts have biases
};
std::span<const ExpertShape> expert_shapes();

// The latent attention of a model that has it.
struct LatentShape {
  std::string_view name;
  int64_t heads, latent, rope, nope, value;  // dimensions: of the latent, of a head's rotated and other part, of values
  DType dtype;                               // of weights and activations

  int64_t row() const { return latent + rope; }
};
std::span<const LatentShape> latent_shapes();

// A kind of step: `decode` takes one token of each of `sequences`, or `prefill` many tokens of one.
struct StepShape {
  std::string_view name;
  int64_t tokens, sequences, kv_length;  // kv_length: keys per sequence, those of the step included
};
std::span<const StepShape> step_shapes();

inline constexpr int64_t kWorkloadBlockSize = 16;

// tokens, sequences, logit_rows (one per sequence) and max_blocks (of kWorkloadBlockSize positions) of a step.
SymbolValues symbols_of(const StepShape& step);

// "llama-3.2-1b prefill-512 q_proj"
std::string workload_name(std::string_view model, const StepShape& step, std::string_view part);
inline std::string workload_name(const ModelShape& model, const StepShape& step, std::string_view part) {
  return workload_name(model.name, step, part);
}

}  // namespace eadem::ops
