// SPDX-License-Identifier: Apache-2.0
//
// decoder_layer and decoder_layers, the fusions: whole layers of a dense decoder, one after another, in one launch. For
// decode steps of one sequence, where kernels of some microseconds each would wait for one another.
//
// A layer is
//   q, k, v = linear_qkv(rms_norm(x, norm), q_weight, k_weight, v_weight)
//   a = linear(rope_append_attention(q, table, k, v, slots, cache_k, cache_v, query_start, kv_length, block_table),
//              o_weight)
//   x = x + a
//   x = x + linear(linear_gated_activation(rms_norm(x, mlp_norm), gate_weight, up_weight), down_weight)
// with the contracts of its parts (rms_norm.h, fusions.h, attention/append_attention.h, linear.h), no biases, and no
// rounding by round_to. Kernels round what products read, as far as matmul_input allows, and round to the dtype of x
// where the parts do.
//
//   inputs   x [tokens, hidden], table, slots, query_start, kv_length, block_table, as of rope_append_attention; then
//   of
//            each layer norm [hidden], q_weight, k_weight, v_weight, cache_k, cache_v (state), o_weight, mlp_norm
//            [hidden], gate_weight, up_weight, down_weight
//   outputs  y like x; then of each layer cache_k, cache_v
//
// decoder_layer is one layer, decoder_layers are two or more with the same attributes. Inference only.
#pragma once

#include "eadem/kernels/attention/append_attention.h"
#include "eadem/kernels/fusions.h"

namespace eadem::kernels {

// Ports of the inputs, and of the outputs.
struct DecoderLayerPorts {
  enum Shared : size_t { kX, kTable, kSlots, kQueryStart, kKvLength, kBlockTable, kSharedInputs };
  enum OfLayer : size_t {
    kNorm,
    kQWeight,
    kKWeight,
    kVWeight,
    kCacheK,
    kCacheV,
    kOWeight,
    kMlpNorm,
    kGateWeight,
    kUpWeight,
    kDownWeight,
    kLayerInputs
  };
  static constexpr size_t kLayerOutputs = 2;  // behind y
  static constexpr size_t input(size_t layer, OfLayer port) { return kSharedInputs + layer * kLayerInputs + port; }
  // `port`: kCacheK or kCacheV.
  static constexpr size_t output(size_t layer, OfLayer port) { return 1 + layer * kLayerOutputs + (port - kCacheK); }
  static constexpr size_t layers(size_t inputs) { return (inputs - kSharedInputs) / kLayerInputs; }
};

struct DecoderLayerAttrs {
  RmsNormAttrs norm, mlp_norm;
  LinearAttrs qkv, o, down;
  RopeAppendAttentionAttrs attention;
  LinearGatedActivationAttrs gated;

  bool operator==(const DecoderLayerAttrs&) const = default;
};

}  // namespace eadem::kernels
