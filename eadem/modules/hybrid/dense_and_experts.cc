// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/dense_and_experts.h"

#include "eadem/ops/elementwise/elementwise.h"

namespace eadem::modules {

ValueId DenseAndExperts::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const int64_t hidden = config_.dense.hidden;
  const auto normalized = [&](const NormSpec& norm, ValueId value) {
    return Norm(norm, hidden).build(context, value, layer_);
  };
  const auto dense = [&] {
    const ValueId in = normalized(config_.before_dense, x);
    const Graph::Scope scope(graph, "mlp");
    return DenseMlp(config_.dense, layer_).build(context, in);
  };
  const auto experts = [&] {
    const ValueId in = normalized(config_.before_experts, x);
    const Graph::Scope scope(graph, "moe");
    return MoeMlp(config_.experts, layer_).build(context, in, x);
  };
  const ValueId first = normalized(config_.after_dense, dense());
  const ValueId second = normalized(config_.after_experts, experts());
  return graph.add1(std::make_shared<ops::Add>(), {first, second});
}

}  // namespace eadem::modules
