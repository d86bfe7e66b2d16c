// SPDX-License-Identifier: Apache-2.0
//
// Patterns that one kernel serves in one sweep, beyond those laid down beside their ops (rope_kv_append in kv_append.h,
// linear_cross_entropy in cross_entropy.h). Inference only, where nothing else is said.
//
// add_rms_norm: sum = a + b; y = rms_norm(sum, weight)
//   inputs   a, b [tokens, hidden] f32 or bf16; weight [hidden].   outputs: sum (in inference it may alias a), y;
//   forward also inv_rms [tokens] f32. Attributes: RmsNormAttrs.
//   backward inputs: sum, weight, inv_rms, dsum (optional: nothing else read the sum), dy.   outputs: da =, which is db
//   too, dweight f32 +=. The norm's part of da is rounded to its dtype before dsum is added, so the bits are those of
//   the separate ops.
// rms_norm_quantize: y = quantize(rms_norm(x, weight))
//   inputs   x [tokens, hidden]; weight [hidden].   outputs: y, encoded. Attributes: RmsNormQuantizeAttrs.
// add_rms_norm_quantize: sum = a + b; y = quantize(rms_norm(sum, weight))
//   inputs   a, b [tokens, hidden]; weight [hidden].   outputs: sum (may alias a), y, encoded. Attributes likewise.
// linear_gated_activation: y = f(x gate_weight^T) * (x up_weight^T)
//   inputs   x [tokens, in]; gate_weight, up_weight [out, in] (parameters).   outputs: y [tokens, out].
// linear_gated_activation_quantize: y = quantize(f(x gate_weight^T) * (x up_weight^T))
//   ports and attributes of linear_gated_activation; y is encoded as round_to says.
// gated_activation_quantize: y = quantize(f(gate) * up); training, in the forward pass
//   inputs   gate, up [tokens, width] of one dtype; scaling (kernels/quantize.h).   outputs: y, in a delayed
//   Fp8TensorEncoding; scaling. Attributes: GatedQuantizeAttrs.
// gated_gradients_quantize: dgate = quantize(dy * up * f'(gate)), dup = quantize(dy * f(gate)); training, a kernel of
// the forward pass though its node stands in the backward one
//   inputs   gate, up, dy [tokens, width] of one dtype; dgate_scaling, dup_scaling.   outputs: dgate, in a delayed
//   Fp8TensorEncoding; dgate_scaling; dup, likewise; dup_scaling. Attributes: GatedQuantizeAttrs.
// Both round values to the dtype of gate before they become codes, so the bits are those of the separate ops.
// linear_add: y = x weight^T + bias + residual
//   inputs   x, weight, bias (optional), residual [tokens, out].   outputs: y (may alias residual). Attributes:
//   LinearAttrs.
// linear_qkv: q = x q_weight^T + q_bias; k and v likewise
//   inputs   x [tokens, in]; q_weight [out_q, in], q_bias [out_q] (optional), k_weight, k_bias, v_weight, v_bias; all
//   biases or none.   outputs: q, k, v [tokens, out]. Attributes: LinearAttrs.
#pragma once

#include "eadem/kernels/elementwise.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/quantize.h"
#include "eadem/kernels/rms_norm.h"

namespace eadem::kernels {

struct RmsNormQuantizeAttrs {
  RmsNormAttrs norm;
  const Encoding* to = nullptr;
};

struct LinearGatedActivationAttrs {
  ActivationKind kind = ActivationKind::silu;
  DType out_dtype = DType::f32;
  MatmulInput matmul_input = MatmulInput::int8;  // how far x may be rounded
  const Encoding* round_to = nullptr;            // linear_gated_activation_quantize: of y

  bool operator==(const LinearGatedActivationAttrs&) const = default;
};

struct GatedQuantizeAttrs {
  ActivationKind kind = ActivationKind::silu;
  const Encoding* to = nullptr;
};

}  // namespace eadem::kernels
