// SPDX-License-Identifier: Apache-2.0
//
// A causal convolution along the tokens of each sequence, each channel by itself:
//   z[t, c] = bias[c] + sum_{j < taps} weight[j, c] * x[t - (taps - 1) + j, c],   y = z, or y = silu(z)
// where the rows of x before a sequence's first token are zeros, or those that the state has kept.
//
//   inputs   x [tokens, channels] f32 or bf16
//            weight [taps, channels] f32 (parameter): the last tap meets the token itself
//            bias [channels] f32 (parameter, optional)
//            query_start [sequences + 1] i32: tokens of sequence s are [query_start[s], query_start[s + 1])
//            cached only: state_slots [sequences] i32, distinct or negative; state [num_slots, taps - 1, channels] f32:
//            the last rows of x of the sequence in a slot, the oldest first, zeros where it had none yet. A sequence
//            with a negative slot begins with zeros and leaves nothing.
//   outputs  y [tokens, channels] dtype of x; cached also the state (inference only: the port is an alias)
//   backward (not cached) inputs: x, weight, bias, query_start, dy.
//            outputs: dx =, dweight f32 +=, dbias f32 += (tokens added in order).
//
// Sums in f32, bias first, then tap by tap: what precedes a token may lie in its step or in the state, with the same
// bits.
#pragma once

#include <cstdint>

namespace eadem::kernels {

inline constexpr int64_t kMaxTaps = 8;

struct ShortConvolutionAttrs {
  int64_t taps = 4;  // 2 to kMaxTaps
  bool silu = false;
  bool cached = false;
};

}  // namespace eadem::kernels
