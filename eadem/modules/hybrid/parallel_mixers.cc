// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/parallel_mixers.h"

#include "eadem/ops/elementwise/elementwise.h"

namespace eadem::modules {

ValueId ParallelMixers::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const auto scaled = [&](double factor, ValueId value) {
    if (factor == 1) return value;
    return graph.add1(std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(factor)}), {value});
  };
  const auto mamba = [&] {
    const Graph::Scope scope(graph, "mamba");
    return scaled(config_.mamba_out, Mamba2(config_.mamba, layer_).build(context, scaled(config_.mamba_in, x)));
  };
  const auto attention = [&] {
    const Graph::Scope scope(graph, "self_attn");
    const ValueId y = CausalAttention(config_.attention, layer_).build(context, scaled(config_.attention_in, x));
    return scaled(config_.attention_out, y);
  };
  const ValueId recurrent = mamba();
  return graph.add1(std::make_shared<ops::Add>(), {recurrent, attention()});
}

}  // namespace eadem::modules
