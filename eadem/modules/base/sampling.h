// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Draws one token per row of logits. How each is drawn is an input of the graph, `sample_rows`, beside the pairs that
// its penalties need, `penalties` (see kernels/sample.h). Marks the outputs `token` and `logprob`.
class Sampling {
 public:
  // Lets token_ids of the step name rows of the step before, whose tokens the input `sampled` [logit_rows] i32 has (see
  // kernels/feed_tokens.h).
  void feed(BuildContext& context) const;
  void build(BuildContext& context, ValueId logits) const;
};

}  // namespace eadem::modules
