// SPDX-License-Identifier: Apache-2.0
//
// Draws one token per row.
//
//   inputs   logits [rows, vocab] f32 (not changed)
//            temperature [rows] f32 >= 0; top_k [rows] i32, <= 0: off; top_p [rows] f32 in (0, 1]; min_p [rows] f32 in
//            [0, 1] seed [rows] i64; position [rows] i64: the position in its sequence of the token to be drawn
//   outputs  token [rows] i32; logprob [rows] f32: log softmax of the unmodified logits at the token
//
// Temperature 0 is greedy: the smallest index among the largest logits. Otherwise, in this order:
//   1. p = softmax(logits / temperature);
//   2. top_k: keep the k largest, at equal values those with smaller index;
//   3. top_p: of the kept, renormalized, in order of falling p (equal: rising index), keep the shortest prefix whose
//   sum
//      reaches top_p, at least one;
//   4. min_p: drop what is below min_p times the largest p;
//   5. with u = uniform_float(philox4x32(seed, position).words[0]), pick in order of index the first kept token whose
//      cumulated p exceeds u * (sum of the kept p).
// A row whose logits hold NaN or whose largest logit is not finite gives token -1 (the engine fails that request
// alone).
#pragma once
