// SPDX-License-Identifier: Apache-2.0
//
// y[i] = x[i] * scale[index[i]], or without an index x[i] * scale[0]: products with parameters of which there are few.
//
//   inputs   x [...] f32 or bf16; scale [n] f32 (parameter), n = 1 without an index; index [...] i32 like x, of [0, n),
//            which is there if the attribute says so
//   outputs  y [...] dtype of x (inference may write it over x)
//   backward inputs: x, scale, index (if there), dy.  outputs: dx[i] = dy[i] * scale[index[i]];
//            dscale[j] f32 += the sum of dy[i] * x[i] over index[i] = j, in f64 and in the order of i.
#pragma once

namespace eadem::kernels {

struct ScaleByAttrs {
  bool indexed = false;
};

}  // namespace eadem::kernels
