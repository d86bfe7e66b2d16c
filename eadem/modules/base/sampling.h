// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Draws one token per row of logits. How each is drawn is an input of the graph, `sample_rows`, beside the pairs that
// its penalties need, `penalties` (see kernels/sample.h). Marks the outputs `token` and `logprob`.
class Sampling {
 public:
  void build(BuildContext& context, ValueId logits) const;
};

}  // namespace eadem::modules
