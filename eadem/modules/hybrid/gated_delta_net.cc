// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/gated_delta_net.h"

#include "eadem/modules/base/rms_norm.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

std::vector<std::pair<std::string, Shape>> GatedDeltaNet::Config::parameters() const {
  const int64_t keys = key_heads * key_dim, values = value_heads * value_dim;
  std::vector<std::pair<std::string, Shape>> list;
  for (const auto& [name, channels] : {std::pair<const char*, int64_t>{"q", keys}, {"k", keys}, {"v", values}}) {
    list.emplace_back(fmt::format("{}_proj.weight", name), Shape{channels, hidden});
    list.emplace_back(fmt::format("{}_conv1d.weight", name), Shape{taps, channels});
  }
  const auto add_gate = [&](const char* plain, const char* low, const char* high, int64_t out) {
    if (gate_rank == 0) return void(list.emplace_back(plain, Shape{out, hidden}));
    list.emplace_back(low, Shape{gate_rank, hidden});
    list.emplace_back(high, Shape{out, gate_rank});
  };
  add_gate("a_proj.weight", "f_a_proj.weight", "f_b_proj.weight", decays());
  list.emplace_back("b_proj.weight", Shape{value_heads, hidden});
  list.emplace_back("A_log", Shape{value_heads});
  list.emplace_back("dt_bias", Shape{decays()});
  list.emplace_back("norm.weight", Shape{value_dim});
  add_gate("z_proj.weight", "g_a_proj.weight", "g_b_proj.weight", values);
  list.emplace_back("o_proj.weight", Shape{hidden, values});
  return list;
}

ValueId GatedDeltaNet::project(BuildContext& context, const char* name, int64_t in, int64_t out, Parallel parallel,
                               ValueId x) const {
  return LinearFactory::build(context,
                              {.name = name,
                               .in = in,
                               .out = out,
                               .parallel = parallel,
                               .hardware = &context.hardware.of(Role::attention, layer_),
                               .in_heads = parallel == Parallel::row ? config_.value_heads : 0},
                              x);
}

ValueId GatedDeltaNet::build_stream(BuildContext& context, const std::string& name, int64_t heads, int64_t dim,
                                    ValueId x) const {
  const ValueId flat = project(context, (name + "_proj").c_str(), config_.hidden, heads * dim, Parallel::column, x);
  const Graph::Scope scope(context.graph, name + "_conv1d");
  const ShortConvolution convolution({.channels = heads * dim, .taps = config_.taps, .divided = true});
  return context.graph.add1(
      std::make_shared<ops::Reshape>(std::vector<int64_t>{context.share(heads, "heads of linear attention"), dim}),
      {convolution.build(context, flat)});
}

ValueId GatedDeltaNet::build_gate(BuildContext& context, const char* plain, const char* low, const char* high,
                                  int64_t out, ValueId x) const {
  if (config_.gate_rank == 0) return project(context, plain, config_.hidden, out, Parallel::column, x);
  const ValueId narrow = project(context, low, config_.hidden, config_.gate_rank, Parallel::none, x);
  return project(context, high, config_.gate_rank, out, Parallel::column, narrow);
}

ValueId GatedDeltaNet::build_rule(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const bool cached = context.cache.layout != CacheLayout::none;
  const kernels::GatedDeltaRuleAttrs attrs{.key_heads = context.share(config_.key_heads, "key heads"),
                                           .value_heads = context.share(config_.value_heads, "value heads"),
                                           .key_dim = config_.key_dim,
                                           .value_dim = config_.value_dim,
                                           .channel_decay = config_.channel_decay,
                                           .tiled = config_.tiled,
                                           .cached = cached};
  const auto parameter = [&](const char* name, int64_t size) {
    return graph.add_parameter(graph.scoped_name(name), TensorType(DType::f32, {size}), /*shard_axis=*/0);
  };
  std::vector<ValueId> inputs = {build_stream(context, "q", config_.key_heads, config_.key_dim, x),
                                 build_stream(context, "k", config_.key_heads, config_.key_dim, x),
                                 build_stream(context, "v", config_.value_heads, config_.value_dim, x),
                                 build_gate(context, "a_proj", "f_a_proj", "f_b_proj", config_.decays(), x),
                                 project(context, "b_proj", config_.hidden, config_.value_heads, Parallel::column, x),
                                 parameter("A_log", config_.value_heads),
                                 parameter("dt_bias", config_.decays()),
                                 context.step.query_start};
  if (cached) {
    TensorType row(DType::f32, {attrs.value_heads, attrs.state_floats()});
    if (context.num_ranks > 1) row.sharding = Sharding::along(0);
    inputs.push_back(context.step.state_slots);
    inputs.push_back(
        context.add_state({.name = graph.scoped_name("state"), .kind = StateSpec::Kind::per_sequence, .row = row}));
  }
  return graph.add(std::make_shared<ops::GatedDeltaRule>(attrs), inputs)[0];
}

ValueId GatedDeltaNet::build(BuildContext& context, ValueId x) const {
  if (config_.tiled && context.num_ranks > 1)
    throw Unsupported(
        "the value heads of linear attention are in the order of GGUF files, which {} ranks cannot divide",
        context.num_ranks);
  Graph& graph = context.graph;
  const int64_t values = config_.value_heads * config_.value_dim;
  const ValueId mixed = build_rule(context, x);
  const auto normalize = [&] {
    const Graph::Scope scope(graph, "norm");
    return RmsNorm(config_.value_dim, config_.norm_eps).build(context, mixed, layer_);
  };
  const ValueId flat =
      graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{context.share(values, "values")}), {normalize()});
  const ValueId z = build_gate(context, "z_proj", "g_a_proj", "g_b_proj", values, x);
  const ValueId gated =
      graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{config_.gate}), {z, flat});
  return project(context, "o_proj", values, config_.hidden, Parallel::row, gated);
}

}  // namespace eadem::modules
