// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/short_convolution.h"

namespace eadem::modules {

ValueId ShortConvolution::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const bool cached = context.cache.layout != CacheLayout::none;
  // The channels are the last axis of all.
  const auto parameter = [&](const char* name, std::initializer_list<Dim> dims) {
    const int axis = config_.divided ? static_cast<int>(dims.size()) - 1 : -1;
    return graph.add_parameter(graph.scoped_name(name), TensorType(DType::f32, dims), axis);
  };
  std::vector<ValueId> inputs = {x, parameter("weight", {config_.taps, config_.channels}),
                                 config_.bias ? parameter("bias", {config_.channels}) : pipeline::kNoValue,
                                 context.step.query_start};
  if (cached) {
    inputs.push_back(context.step.state_slots);
    TensorType row(DType::f32, {config_.taps - 1,
                                config_.divided ? context.share(config_.channels, "channels") : config_.channels});
    if (config_.divided && context.num_ranks > 1) row.sharding = Sharding::along(1);
    inputs.push_back(context.add_state(
        {.name = graph.scoped_name("conv_state"), .kind = StateSpec::Kind::per_sequence, .row = row}));
  }
  return graph.add(
      std::make_shared<ops::ShortConvolution>(kernels::ShortConvolutionAttrs{config_.taps, config_.silu, cached}),
      inputs)[0];
}

}  // namespace eadem::modules
