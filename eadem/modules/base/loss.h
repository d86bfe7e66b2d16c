// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// loss[t] = cross entropy of logits[t, :] at labels[t]; 0 where the label is negative. logits [rows, vocab], labels
// [rows] i32.
class CrossEntropyLoss {
 public:
  ValueId build(BuildContext& context, ValueId logits, ValueId labels) const;
};

}  // namespace eadem::modules
