// SPDX-License-Identifier: Apache-2.0
//
// scale_by_position: y[t, h, :] = factor(positions[t]) * x[t, h, :], a temperature of queries that grows with their
// positions:
//   factor(p) = 1 + rate * ln(1 + floor((p + plus_one) / length))
//   inputs   x [tokens, heads, head_dim] f32 or bf16; positions [tokens] i32
//   outputs  y like x (inference may alias x)
//   backward inputs: positions, dy.  outputs: dx = factor * dy.
// The factor is computed in double precision and rounded once to f32.
//
// Source: Nakanishi 2025; Llama 4 (transformers, models/llama4) has plus_one, Mistral 4 (models/mistral4) has not.
#pragma once

#include <cmath>
#include <cstdint>

namespace eadem::kernels {

struct ScaleByPositionAttrs {
  float rate = 0.1f;
  int64_t length = 8192;
  bool plus_one = true;

  double factor(int64_t position) const {
    const int64_t lengths = (position + (plus_one ? 1 : 0)) / length;
    return 1.0 + static_cast<double>(rate) * std::log1p(static_cast<double>(lengths));
  }
};

}  // namespace eadem::kernels
