// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/norm.h"

#include "eadem/modules/base/layer_norm.h"
#include "eadem/modules/base/rms_norm.h"

namespace eadem::modules {

ValueId Norm::build(BuildContext& context, ValueId x, int layer) const {
  const Graph::Scope scope(context.graph, spec_.name);
  if (spec_.kind == NormSpec::Kind::rms) return RmsNorm(size_, spec_.eps).build(context, x, layer);
  return LayerNorm(size_, spec_.eps, spec_.bias).build(context, x, layer);
}

}  // namespace eadem::modules
