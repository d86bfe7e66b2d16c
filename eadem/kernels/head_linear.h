// SPDX-License-Identifier: Apache-2.0
//
// head_linear: every head has a matrix of its own.
//   y[t, h, :] = weight[h] x[t, h, :]
//   inputs   x [tokens, heads, in] f32 or bf16; weight [heads, out, in] f32, bf16 or f16 (parameter).
//   outputs  y [tokens, heads, out] in out_dtype.
//   backward inputs: x, weight, dy.  outputs: dx =, dweight [heads, out, in] f32 +=.
//
// Accumulates in f32. A row's terms are added in the order that linear has for a matrix in the same format: the result
// does not depend on the other rows, on their number or on the thread count.
// Latent attention takes queries into the space of the latent and results out of it (DeepSeek-AI 2024, section 2.1.2).
#pragma once

#include "eadem/core/dtype.h"
#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

struct HeadLinearAttrs {
  DType out_dtype = DType::f32;
  MatmulInput matmul_input = MatmulInput::int8;  // how far x may be rounded
};

}  // namespace eadem::kernels
