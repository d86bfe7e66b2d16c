// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = (x[r, :] - mean) / std * weight + bias,   mean = mean(x[r, :]),   std = sqrt(mean((x[r, :] - mean)^2) +
// eps)
//
//   inputs   x [..., hidden] f32 or bf16; weight [hidden] f32 or the dtype of x (parameter); bias [hidden], dtype of
//            weight (parameter, optional)
//   outputs  y [..., hidden] dtype of x (inference may alias x); forward also mean [...] and inv_std [...] f32
//   backward inputs: x, weight, mean, inv_std, dy.
//            outputs: dx =, dweight [hidden] f32 +=, dbias [hidden] f32 += (rows added in order).
//
// Sums in f32; the mean is subtracted before anything is squared. Source: Ba et al. 2016.
#pragma once

namespace eadem::kernels {

struct LayerNormAttrs {
  float eps = 1e-5f;
};

}  // namespace eadem::kernels
