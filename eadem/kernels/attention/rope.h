// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding, in two ops: the table of a step is computed once and used by every layer.
//
// rope_table: table[t, i] = scale * cos(p * inv_freq[i]), table[t, half + i] = scale * sin(…), i < half, where p is
//   positions[t], or with a stride the largest multiple of it up to there
//   inputs   positions [tokens] i32; inv_freq [half] f32 (constant)
//   outputs  table [tokens, 2 * half] f32
//   The angle is computed in double precision: at position 10^5 an f32 product is off by 0.006 radian.
//   No gradient.
//
// rope: rotates the first rotary_dim = 2 * half elements of each head, or its last ones, and passes the rest through.
//   inputs   x [tokens, heads, head_dim] f32 or bf16; table [tokens, rotary_dim] f32
//   outputs  y like x (inference may alias x)
//   rotate_half: pairs (i, i + half);  interleaved: pairs (2i, 2i + 1);  i < half
//     y_first = x_first * cos_i - x_second * sin_i,   y_second = x_second * cos_i + x_first * sin_i
//   backward inputs: table, dy.  outputs: dx (the inverse rotation, times the same scale).
//
// Source: Su et al. 2021. The pair layouts are those of Hugging Face Llama (rotate_half) and of the original Llama
// and GGUF files (interleaved).
#pragma once

#include <cstdint>

namespace eadem::kernels {

struct RopeTableAttrs {
  float scale = 1.0f;  // YaRN attention factor
  int64_t stride = 1;
};

enum class RopeStyle : uint8_t { rotate_half, interleaved };

struct RopeAttrs {
  RopeStyle style = RopeStyle::rotate_half;
  int64_t rotary_dim = 0;
  bool last = false;  // the last elements rotate

  bool operator==(const RopeAttrs&) const = default;
};

}  // namespace eadem::kernels
