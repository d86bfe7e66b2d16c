// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/mamba2.h"

#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/base/short_convolution.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/recurrent/state_space_scan.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

ValueId reshaped(Graph& graph, std::vector<int64_t> dims, ValueId x) {
  return graph.add1(std::make_shared<ops::Reshape>(std::move(dims)), {x});
}

}  // namespace

ValueId Mamba2::convolve(BuildContext& context, const char* name, int64_t channels, ValueId x) const {
  const Graph::Scope scope(context.graph, name);
  return ShortConvolution({.channels = channels, .taps = config_.taps, .bias = config_.conv_bias, .silu = true})
      .build(context, x);
}

ValueId Mamba2::scan(BuildContext& context, ValueId x, ValueId b, ValueId c, ValueId dt) const {
  Graph& graph = context.graph;
  const auto of_heads = [&](const char* name) {
    return graph.add_parameter(graph.scoped_name(name), TensorType(DType::f32, {config_.heads}));
  };
  const std::vector<int64_t> shared = {config_.groups, config_.state};
  std::vector<ValueId> inputs = {reshaped(graph, {config_.heads, config_.head_dim}, x),
                                 dt,
                                 reshaped(graph, shared, b),
                                 reshaped(graph, shared, c),
                                 of_heads("dt_bias"),
                                 of_heads("A_log"),
                                 of_heads("D"),
                                 context.step.query_start};
  const bool cached = context.cache.layout != CacheLayout::none;
  if (cached) {
    inputs.push_back(context.step.state_slots);
    inputs.push_back(
        context.add_state({.name = graph.scoped_name("state"),
                           .kind = StateSpec::Kind::per_sequence,
                           .row = TensorType(DType::f32, {config_.heads, config_.state, config_.head_dim})}));
  }
  return graph.add(
      std::make_shared<ops::StateSpaceScan>(kernels::StateSpaceScanAttrs{.cached = cached,
                                                                         .dt_min = static_cast<float>(config_.dt_min),
                                                                         .dt_max = static_cast<float>(config_.dt_max)}),
      std::move(inputs))[0];
}

ValueId Mamba2::normalize(BuildContext& context, ValueId y) const {
  if (!config_.norm_eps) return y;
  const Graph::Scope scope(context.graph, "norm");
  const int64_t size = config_.inner() / config_.groups;
  const ValueId grouped = reshaped(context.graph, {config_.groups, size}, y);
  return reshaped(context.graph, {config_.inner()},
                  RmsNorm(size, *config_.norm_eps, config_.groups).build(context, grouped, layer_));
}

ValueId Mamba2::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const HardwareConfig& hardware = context.hardware.of(Role::attention, layer_);
  std::array<ValueId, 5> parts{};
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [name, size] = config_.parts()[i];
    parts[i] = LinearFactory::build(context,
                                    {.name = std::string(name) + "_proj",
                                     .in = config_.hidden,
                                     .out = size,
                                     .bias = config_.in_bias,
                                     .hardware = &hardware},
                                    x);
    if (config_.scales[i] == 1) continue;
    const Graph::Scope scope(graph, name);
    parts[i] = graph.add1(
        std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(config_.scales[i])}), {parts[i]});
  }
  const int64_t shared = config_.groups * config_.state;
  const ValueId scanned =
      scan(context, convolve(context, "x_conv", config_.inner(), parts[1]),
           convolve(context, "b_conv", shared, parts[2]), convolve(context, "c_conv", shared, parts[3]), parts[4]);
  const auto gate = [&](ValueId y) {
    return graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{kernels::ActivationKind::silu}),
                      {parts[0], y});
  };
  const ValueId y = reshaped(graph, {config_.inner()}, scanned);
  const ValueId gated = config_.norm_before_gate ? gate(normalize(context, y)) : normalize(context, gate(y));
  return LinearFactory::build(context,
                              {.name = "out_proj",
                               .in = config_.inner(),
                               .out = config_.hidden,
                               .bias = config_.out_bias,
                               .hardware = &hardware},
                              gated);
}

}  // namespace eadem::modules
