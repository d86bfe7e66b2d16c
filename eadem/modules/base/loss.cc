// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/loss.h"

#include "eadem/ops/cross_entropy.h"

namespace eadem::modules {

ValueId CrossEntropyLoss::build(BuildContext& context, ValueId logits, ValueId labels) const {
  return context.graph.add1(std::make_shared<ops::CrossEntropy>(), {logits, labels});
}

}  // namespace eadem::modules
