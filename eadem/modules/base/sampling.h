// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Draws one token per row of logits. The per-request parameters are inputs of the graph, one entry per logit row:
// temperature, top_k, top_p, min_p, seed, draw_position (see kernels/sample.h). Marks the outputs `token` and
// `logprob`.
class Sampling {
 public:
  void build(BuildContext& context, ValueId logits) const;
};

}  // namespace eadem::modules
