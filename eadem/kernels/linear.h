// SPDX-License-Identifier: Apache-2.0
//
// y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]
//
//   inputs   x [tokens, in] f32 or bf16; weight [out, in] f32, bf16 or f16 (parameter);
//            bias [out] (parameter, optional)
//   outputs  y [tokens, out] in out_dtype
//   backward inputs: x, weight, dy.
//            outputs: dx [tokens, in] =, dweight [out, in] f32 +=, dbias [out] f32 += (not connected without bias).
//
// Accumulates in f32. The order in which the terms of an output are added is fixed by the weight format and never
// depends on the number of rows, on how rows are grouped into calls, or on the thread count.
#pragma once

#include "eadem/core/dtype.h"
#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

struct LinearAttrs {
  bool has_bias = false;
  DType out_dtype = DType::f32;
  MatmulInput matmul_input = MatmulInput::int8;  // how far x, and in the backward pass dy, may be rounded

  bool operator==(const LinearAttrs&) const = default;
};

}  // namespace eadem::kernels
