// SPDX-License-Identifier: Apache-2.0
//
// Patterns that one kernel serves in one sweep, beyond those laid down beside their ops (rope_kv_append in kv_append.h,
// linear_cross_entropy in cross_entropy.h). All of these are inference only.
//
// add_rms_norm: sum = a + b; y = rms_norm(sum, weight)
//   inputs   a, b [tokens, hidden] f32 or bf16; weight [hidden].   outputs: sum (may alias a), y. Attributes:
//   RmsNormAttrs.
// linear_gated_activation: y = f(x gate_weight^T) * (x up_weight^T)
//   inputs   x [tokens, in]; gate_weight, up_weight [out, in] (parameters).   outputs: y [tokens, out].
// linear_add: y = x weight^T + bias + residual
//   inputs   x, weight, bias (optional), residual [tokens, out].   outputs: y (may alias residual). Attributes:
//   LinearAttrs.
// linear_qkv: q = x q_weight^T + q_bias; k and v likewise
//   inputs   x [tokens, in]; q_weight [out_q, in], q_bias [out_q] (optional), k_weight, k_bias, v_weight, v_bias; all
//   biases or none.   outputs: q, k, v [tokens, out]. Attributes: LinearAttrs.
#pragma once

#include "eadem/kernels/elementwise.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/rms_norm.h"

namespace eadem::kernels {

struct LinearGatedActivationAttrs {
  ActivationKind kind = ActivationKind::silu;
  DType out_dtype = DType::f32;
};

}  // namespace eadem::kernels
