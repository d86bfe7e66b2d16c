// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/causal_attention.h"

#include "eadem/modules/base/defaults.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/base/shared_heads.h"
#include "eadem/modules/factory/attention_factory.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

HardwareConfig CausalAttention::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId CausalAttention::build_projection(BuildContext& context, const char* name, int64_t all_heads, Parallel parallel,
                                          ValueId x) const {
  return LinearFactory::build(context,
                              {.name = name,
                               .in = config_.hidden,
                               .out = all_heads * config_.head_dim,
                               .bias = config_.qkv_bias,
                               .parallel = parallel,
                               .hardware = &context.hardware.of(Role::attention, layer_)},
                              x);
}

ValueId CausalAttention::clipped(BuildContext& context, const char* name, ValueId flat) const {
  if (config_.clip == 0) return flat;
  const Graph::Scope scope(context.graph, name);
  return context.graph.add1(
      std::make_shared<ops::Scale>(kernels::ScaleAttrs{.limit = static_cast<float>(config_.clip)}), {flat});
}

ValueId CausalAttention::split(BuildContext& context, const char* name, int64_t heads, ValueId flat) const {
  const Graph::Scope scope(context.graph, name);
  return context.graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{heads, config_.head_dim}), {flat});
}

ValueId CausalAttention::build_heads(BuildContext& context, const Names& names, int64_t all_heads, int64_t own_heads,
                                     ValueId flat) const {
  using QkNorm = Config::QkNorm;
  if (config_.qk_norm_eps && config_.qk_norm == QkNorm::whole && own_heads != all_heads)
    throw Unsupported(
        "{}: norms over all {} heads of a token together, which are not divided over tensor-parallel "
        "ranks; there are {}",
        context.graph.scoped_name(names.norm), all_heads, context.num_ranks);
  const auto normalize = [&](QkNorm kind, int64_t size, ValueId value) {
    if (!config_.qk_norm_eps || config_.qk_norm != kind) return value;
    const Graph::Scope scope(context.graph, names.norm);
    const RmsNorm norm(size, *config_.qk_norm_eps);
    return kind == QkNorm::weightless_after_rope ? norm.build_weightless(context, value)
                                                 : norm.build(context, value, layer_);
  };
  const auto rotate = [&](ValueId value) {
    const Graph::Scope scope(context.graph, names.rope);
    return Rope(config_.rope).build(context, value);
  };
  flat = clipped(context, names.projection, normalize(QkNorm::whole, all_heads * config_.head_dim, flat));
  const ValueId each = normalize(QkNorm::per_head, config_.head_dim, split(context, names.projection, own_heads, flat));
  const ValueId rotated = rotate(each);
  return normalize(QkNorm::weightless_after_rope, config_.head_dim,
                   normalize(QkNorm::per_head_after_rope, config_.head_dim, rotated));
}

KvValues CausalAttention::build_kv(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const SharedHeads kv = divide_shared_heads(context, config_.heads, config_.kv_heads);
  const auto select = [&](const char* name, ValueId value) {
    if (!kv.selection) return value;
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::SelectHeads>(*kv.selection), {value});
  };
  const Parallel parallel = kv.selection ? Parallel::none : Parallel::column;
  const int64_t made = kv.selection ? config_.kv_heads : kv.own;  // before the selection
  const ValueId keys = build_projection(context, "k_proj", config_.kv_heads, parallel, x);
  const ValueId k =
      select("k_heads", build_heads(context, {"k_proj", "k_norm", "k_rope"}, config_.kv_heads, made, keys));
  ValueId v =
      split(context, "v_proj", made,
            config_.keys_are_values
                ? keys
                : clipped(context, "v_proj", build_projection(context, "v_proj", config_.kv_heads, parallel, x)));
  if (config_.value_norm) {
    const Graph::Scope scope(graph, "v_norm");
    v = RmsNorm(config_.head_dim, *config_.qk_norm_eps).build_weightless(context, v);
  }
  return {k, select("v_heads", v)};
}

ValueId CausalAttention::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const HardwareConfig& hardware = context.hardware.of(Role::attention, layer_);
  const int64_t heads = context.share(config_.heads, "attention heads");
  ValueId q = build_heads(context, {"q_proj", "q_norm", "q_rope"}, config_.heads, heads,
                          build_projection(context, "q_proj", config_.heads, Parallel::column, x));
  if (config_.temperature) {
    const Graph::Scope scope(graph, "q_temperature");
    q = graph.add1(std::make_shared<ops::ScaleByPosition>(*config_.temperature), {q, context.step.positions});
  }
  const KvValues kv = config_.kv_layer ? KvValues{} : build_kv(context, x);

  const ValueId sinks = config_.sinks ? graph.add_parameter(graph.scoped_name("sinks"),
                                                            TensorType(DType::f32, {config_.heads}), /*shard_axis=*/0)
                                      : pipeline::kNoValue;
  const ValueId mixed =
      AttentionFactory::build(context,
                              {.heads = heads,
                               .kv_heads = divide_shared_heads(context, config_.heads, config_.kv_heads).own,
                               .sharing = config_.heads / config_.kv_heads,
                               .head_dim = config_.head_dim,
                               .scale = config_.scale,
                               .window = config_.window,
                               .softcap = config_.softcap,
                               .sinks = config_.sinks,
                               .chunk = config_.chunk,
                               .layer = layer_,
                               .kv_layer = config_.kv_layer,
                               .cache = {}},
                              {q, kv.k, kv.v, sinks});
  ValueId flat = graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{heads * config_.head_dim}), {mixed});
  if (config_.gated)
    flat =
        graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{kernels::ActivationKind::sigmoid}),
                   {build_projection(context, "g_proj", config_.heads, Parallel::column, x), flat});
  return LinearFactory::build(context,
                              {.name = "o_proj",
                               .in = config_.heads * config_.head_dim,
                               .out = config_.hidden,
                               .bias = config_.out_bias,
                               .parallel = Parallel::row,
                               .hardware = &hardware,
                               .in_heads = config_.heads},
                              flat);
}

}  // namespace eadem::modules
