// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = x[r, :] / rms(x[r, :]) * weight,   rms(v) = sqrt(mean(v^2) + eps)
//
//   inputs   x [..., hidden] f32 or bf16; weight [hidden] f32 or the dtype of x (parameter), or a weight for each of
//            the groups of x [..., groups, hidden]: [groups, hidden]
//   outputs  y [..., hidden] dtype of x (inference may alias x); forward also inv_rms [...] f32
//   backward inputs: x, weight, inv_rms, dy.  outputs: dx =, dweight f32 +=, like the weight (rows added in
//            order).
//
// Sums in f32. Source: Zhang & Sennrich 2019, equation 4.
#pragma once

namespace eadem::kernels {

struct RmsNormAttrs {
  float eps = 1e-5f;

  bool operator==(const RmsNormAttrs&) const = default;
};

}  // namespace eadem::kernels
