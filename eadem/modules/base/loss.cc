// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/loss.h"

#include "eadem/ops/parallel/parallel_cross_entropy.h"
#include "eadem/ops/training/cross_entropy.h"

namespace eadem::modules {

ValueId CrossEntropyLoss::build(BuildContext& context, ValueId logits, ValueId labels) const {
  if (context.num_ranks == 1) return context.graph.add1(std::make_shared<ops::CrossEntropy>(), {logits, labels});
  const kernels::VocabularyPart part{context.part(vocab_, "words of the vocabulary").begin};
  const ValueId state = context.graph.add1(std::make_shared<ops::SoftmaxState>(part), {logits, labels});
  return context.graph.add1(std::make_shared<ops::ParallelCrossEntropy>(part, context.num_ranks),
                            {logits, labels, state});
}

}  // namespace eadem::modules
