// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/mamba2.h"

#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/base/shared_heads.h"
#include "eadem/modules/base/short_convolution.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/parallel/collectives.h"
#include "eadem/ops/recurrent/state_space_scan.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

ValueId reshaped(Graph& graph, std::vector<int64_t> dims, ValueId x) {
  return graph.add1(std::make_shared<ops::Reshape>(std::move(dims)), {x});
}

}  // namespace

Mamba2::Division Mamba2::division(const BuildContext& context) const {
  const bool divided = config_.heads % context.num_ranks == 0;
  return {.heads = divided,
          .groups = divided && config_.groups % context.num_ranks == 0,
          .own_heads = divided ? config_.heads / context.num_ranks : config_.heads};
}

ValueId Mamba2::project_part(BuildContext& context, Projection part, bool divided, ValueId x) const {
  const auto [name, size] = config_.parts()[part];
  const ValueId y = LinearFactory::build(context,
                                         {.name = std::string(name) + "_proj",
                                          .in = config_.hidden,
                                          .out = size,
                                          .bias = config_.in_bias,
                                          .parallel = divided ? Parallel::column : Parallel::none,
                                          .hardware = &context.hardware.of(Role::attention, layer_)},
                                         x);
  if (config_.scales[part] == 1) return y;
  const Graph::Scope scope(context.graph, name);
  const kernels::ScaleAttrs attrs{.factor = static_cast<float>(config_.scales[part])};
  return context.graph.add1(std::make_shared<ops::Scale>(attrs), {y});
}

ValueId Mamba2::convolve(BuildContext& context, const char* name, int64_t channels, bool divided, ValueId x) const {
  const Graph::Scope scope(context.graph, name);
  return ShortConvolution(
             {.channels = channels, .taps = config_.taps, .bias = config_.conv_bias, .silu = true, .divided = divided})
      .build(context, x);
}

ValueId Mamba2::build_shared(BuildContext& context, const char* name, ValueId x) const {
  const Division own = division(context);
  const ValueId rows = convolve(context, name, config_.groups * config_.state, own.groups, x);
  const ValueId groups =
      reshaped(context.graph, {own.groups ? config_.groups / context.num_ranks : config_.groups, config_.state}, rows);
  if (!own.heads || own.groups) return groups;
  const Graph::Scope scope(context.graph, name);
  const SharedHeads shared = divide_shared_heads(context, config_.heads, config_.groups);
  return context.graph.add1(std::make_shared<ops::SelectHeads>(*shared.selection), {groups});
}

ValueId Mamba2::scan(BuildContext& context, ValueId x, ValueId b, ValueId c, ValueId dt) const {
  Graph& graph = context.graph;
  const Division own = division(context);
  const auto of_heads = [&](const char* name) {
    return graph.add_parameter(graph.scoped_name(name), TensorType(DType::f32, {config_.heads}), own.heads ? 0 : -1);
  };
  std::vector<ValueId> inputs = {reshaped(graph, {own.own_heads, config_.head_dim}, x),
                                 dt,
                                 build_shared(context, "b_conv", b),
                                 build_shared(context, "c_conv", c),
                                 of_heads("dt_bias"),
                                 of_heads("A_log"),
                                 of_heads("D"),
                                 context.step.query_start};
  const bool cached = context.cache.layout != CacheLayout::none;
  if (cached) {
    TensorType row(DType::f32, {own.own_heads, config_.state, config_.head_dim});
    if (own.heads && context.num_ranks > 1) row.sharding = Sharding::along(0);
    inputs.push_back(context.step.state_slots);
    inputs.push_back(
        context.add_state({.name = graph.scoped_name("state"), .kind = StateSpec::Kind::per_sequence, .row = row}));
  }
  return graph.add(
      std::make_shared<ops::StateSpaceScan>(kernels::StateSpaceScanAttrs{.cached = cached,
                                                                         .dt_min = static_cast<float>(config_.dt_min),
                                                                         .dt_max = static_cast<float>(config_.dt_max)}),
      std::move(inputs))[0];
}

// A group that lies on several ranks is gathered: every rank makes its norm, with the bits of one rank, and keeps the
// heads that are its own.
ValueId Mamba2::normalize(BuildContext& context, ValueId y) const {
  if (!config_.norm_eps) return y;
  Graph& graph = context.graph;
  const Division own = division(context);
  const Graph::Scope scope(graph, "norm");
  const int64_t size = config_.inner() / config_.groups;
  const bool gathers = own.heads && !own.groups;
  if (gathers)
    y = graph.add1(std::make_shared<ops::AllGather>(kernels::CollectiveAttrs{
                       .ranks = context.num_ranks, .rank = context.rank, .dim = 1, .whole = config_.inner()}),
                   {y});
  const ValueId grouped = reshaped(graph, {own.groups ? config_.groups / context.num_ranks : config_.groups, size}, y);
  const ValueId normalized =
      RmsNorm(size, *config_.norm_eps, config_.groups, own.groups).build(context, grouped, layer_);
  const int64_t inner = own.own_heads * config_.head_dim;
  if (!gathers) return reshaped(graph, {inner}, normalized);
  const kernels::SelectHeadsAttrs kept{
      .heads = config_.heads, .own_heads = own.own_heads, .first_query = context.rank * own.own_heads};
  return reshaped(graph, {inner},
                  graph.add1(std::make_shared<ops::SelectHeads>(kept),
                             {reshaped(graph, {config_.heads, config_.head_dim}, normalized)}));
}

ValueId Mamba2::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const Division own = division(context);
  // b and c first: the others' gradients of x are added before ranks exchange them, and then meet those of b and c,
  // which may be whole.
  const ValueId b = project_part(context, kB, own.groups, x), c = project_part(context, kC, own.groups, x),
                z = project_part(context, kZ, own.heads, x), values = project_part(context, kX, own.heads, x),
                dt = project_part(context, kDt, own.heads, x);
  const ValueId scanned = scan(context, convolve(context, "x_conv", config_.inner(), own.heads, values), b, c, dt);
  const auto gate = [&](ValueId y) {
    return graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{kernels::ActivationKind::silu}),
                      {z, y});
  };
  const ValueId y = reshaped(graph, {own.own_heads * config_.head_dim}, scanned);
  const ValueId gated = config_.norm_before_gate ? gate(normalize(context, y)) : normalize(context, gate(y));
  return LinearFactory::build(context,
                              {.name = "out_proj",
                               .in = config_.inner(),
                               .out = config_.hidden,
                               .bias = config_.out_bias,
                               .parallel = own.heads ? Parallel::row : Parallel::none,
                               .hardware = &context.hardware.of(Role::attention, layer_),
                               .in_heads = config_.heads},
                              gated);
}

}  // namespace eadem::modules
