// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/gated_convolution.h"

#include "eadem/modules/base/short_convolution.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise/elementwise.h"

namespace eadem::modules {

std::vector<std::pair<std::string, Shape>> GatedConvolution::Config::parameters() const {
  std::vector<std::pair<std::string, Shape>> result;
  const auto add = [&](const std::string& name, const Shape& weight) {
    result.emplace_back(name + ".weight", weight);
    if (bias) result.emplace_back(name + ".bias", Shape{hidden});
  };
  for (const char* name : {"b_proj", "c_proj", "x_proj"}) add(name, {hidden, hidden});
  add("conv", {taps, hidden});
  add("out_proj", {hidden, hidden});
  return result;
}

ValueId GatedConvolution::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const bool divided = context.num_ranks > 1 && config_.hidden % context.num_ranks == 0;
  const auto project = [&](const char* name, Parallel parallel, ValueId value) {
    const int64_t channels = parallel == Parallel::row ? config_.hidden : 0;
    return LinearFactory::build(context,
                                {.name = name,
                                 .in = config_.hidden,
                                 .out = config_.hidden,
                                 .bias = config_.bias,
                                 .parallel = divided ? parallel : Parallel::none,
                                 .hardware = &context.hardware.of(Role::attention, layer_),
                                 .in_heads = channels},
                                value);
  };
  const auto multiply = [&](ValueId a, ValueId b) { return graph.add1(std::make_shared<ops::Mul>(), {a, b}); };
  const ValueId gated = multiply(project("b_proj", Parallel::column, x), project("x_proj", Parallel::column, x));
  const auto convolve = [&](ValueId value) {
    const Graph::Scope scope(graph, "conv");
    return ShortConvolution({.channels = config_.hidden,
                             .taps = config_.taps,
                             .bias = config_.bias,
                             .silu = false,
                             .divided = divided})
        .build(context, value);
  };
  const ValueId mixed = convolve(gated);
  return project("out_proj", Parallel::row, multiply(project("c_proj", Parallel::column, x), mixed));
}

}  // namespace eadem::modules
