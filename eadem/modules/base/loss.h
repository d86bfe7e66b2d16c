// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Where tensor-parallel ranks divide the vocabulary each sees the logits of its words, and all of them every row's
// loss.
//
// loss[t] = cross entropy of logits[t, :] at labels[t]; 0 where the label is negative. logits [rows, vocab], labels
// [rows] i32.
class CrossEntropyLoss {
 public:
  explicit CrossEntropyLoss(int64_t vocab) : vocab_(vocab) {}

  ValueId build(BuildContext& context, ValueId logits, ValueId labels) const;

 private:
  int64_t vocab_;  // over all ranks
};

// How unevenly the routers that have been built choose experts: a loss [1]. Throws
// InvalidArgument where no layer has experts, or they are not as many in all layers that have some.
class LoadBalancingLoss {
 public:
  ValueId build(BuildContext& context) const;
};

}  // namespace eadem::modules
