// SPDX-License-Identifier: Apache-2.0
//
// Cross entropy where each rank has the logits of a part of the vocabulary, words [first, first + part).
//
// softmax_state: what a rank knows of each row.
//   inputs   logits [rows, part] f32; labels [rows] i32, words of the whole vocabulary
//   outputs  state [rows, 3] f32: m, the largest logit; l, the sum of exp(logit - m); z, the logit of the label, or
//            0 on ranks that do not have it. No gradient: parallel_cross_entropy has that of all of it
//
// parallel_cross_entropy: loss[r] = logsumexp(all logits of r) - logit of labels[r], 0 where labels[r] < 0.
//   inputs   logits, labels; states [rows, ranks * 3]: those of all ranks, side by side
//   outputs  loss [rows] f32; forward also lse [rows] f32. M = max m, L = sum of l exp(m - M) in rank order, in f64:
//            lse = M + log L
//   backward inputs: logits, labels, lse, dloss [rows] f32.
//            outputs: dlogits = dloss * (exp(logits - lse) - onehot(labels - first)), 0 in ignored rows
#pragma once

#include <cstdint>

namespace eadem::kernels {

inline constexpr int64_t kSoftmaxStateWords = 3;

struct VocabularyPart {
  int64_t first = 0;  // the part's first word
};

}  // namespace eadem::kernels
