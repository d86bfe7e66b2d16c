// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// y[r, :] = x[rows[r], :]: the hidden states whose logits are wanted. x [tokens, hidden], rows [logit_rows] i32.
class SelectRows {
 public:
  ValueId build(BuildContext& context, ValueId x, ValueId rows) const;
};

}  // namespace eadem::modules
