// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/loss.h"

#include "eadem/ops/experts/load_balancing_loss.h"
#include "eadem/ops/parallel/parallel_cross_entropy.h"
#include "eadem/ops/training/cross_entropy.h"

namespace eadem::modules {

ValueId CrossEntropyLoss::build(BuildContext& context, ValueId logits, ValueId labels) const {
  if (context.num_ranks == 1) {
    // The head multiplies the gradient of the logits as it does its other operands.
    const bool in_e5m2 = context.hardware.of(Role::lm_head).precision.rounded_head.value != nullptr;
    return context.graph.add1(std::make_shared<ops::CrossEntropy>(kernels::CrossEntropyAttrs{in_e5m2}),
                              {logits, labels});
  }
  const kernels::VocabularyPart part{context.part(vocab_, "words of the vocabulary").begin};
  const ValueId state = context.graph.add1(std::make_shared<ops::SoftmaxState>(part), {logits, labels});
  return context.graph.add1(std::make_shared<ops::ParallelCrossEntropy>(part, context.num_ranks),
                            {logits, labels, state});
}

ValueId LoadBalancingLoss::build(BuildContext& context) const {
  if (context.routers.empty()) throw InvalidArgument("no layer has experts whose load could be balanced");
  const int64_t top_k = context.routers[0].top_k;
  std::vector<ValueId> logits;
  for (const RouterValues& router : context.routers) {
    if (router.top_k != top_k)
      throw InvalidArgument(
          "{} and {} experts of a layer compute a token; their load can be balanced where all layers "
          "are alike",
          top_k, router.top_k);
    logits.push_back(router.logits);
  }
  return context.graph.add1(std::make_shared<ops::LoadBalancingLoss>(static_cast<int>(logits.size()),
                                                                     kernels::LoadBalancingLossAttrs{.top_k = top_k}),
                            logits);
}

}  // namespace eadem::modules
