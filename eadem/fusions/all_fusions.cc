// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/add_rms_norm.h"
#include "eadem/fusions/decoder_layers.h"
#include "eadem/fusions/gated_activation_quantize.h"
#include "eadem/fusions/gated_quantize.h"
#include "eadem/fusions/linear_add.h"
#include "eadem/fusions/linear_cross_entropy.h"
#include "eadem/fusions/linear_gated_activation.h"
#include "eadem/fusions/linear_qkv.h"
#include "eadem/fusions/rms_norm_quantize.h"
#include "eadem/fusions/rope_append_attention.h"
#include "eadem/fusions/rope_kv_append.h"
#include "eadem/fusions/rope_qk_append.h"

namespace eadem::fusions {

std::span<const Fusion* const> all_fusions() {
  // decoder_layer has a linear_gated_activation and a rope_append_attention in its pattern, and projections, additions
  // and norms that linear_add, add_rms_norm and linear_qkv want as well: where it is refused, they take them.
  //
  // linear_add before add_rms_norm, which want the same `add`: of a projection, a residual and a norm, linear_add
  // leaves four passes over the hidden state (read the residual, write the sum; read it, write the norm),
  // add_rms_norm five (write the product; read it and the residual, write the sum and the norm). The bits are the same.
  // add_rms_norm takes the additions that no linear precedes directly, as after the all_reduce of tensor-parallel
  // ranks, and those whose linear_add is switched off or refused.
  static const Fusion* const all[] = {&linear_gated_activation(),
                                      &rope_append_attention(),
                                      &decoder_layer(),
                                      &rope_qk_append(),
                                      &rope_kv_append(),
                                      &linear_cross_entropy(),
                                      &linear_add(),
                                      &add_rms_norm(),
                                      &linear_qkv(),
                                      &add_rms_norm_quantize(),
                                      &rms_norm_quantize(),
                                      &rope_append_attention_quantize(),
                                      &linear_gated_activation_quantize(),
                                      &gated_activation_quantize(),
                                      &gated_gradients_quantize()};
  return all;
}

}  // namespace eadem::fusions
