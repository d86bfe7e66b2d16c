// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/select_rows.h"

#include "eadem/ops/select_rows.h"

namespace eadem::modules {

ValueId SelectRows::build(BuildContext& context, ValueId x, ValueId rows) const {
  return context.graph.add1(std::make_shared<ops::SelectRows>(), {x, rows});
}

}  // namespace eadem::modules
