// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/causal_attention.h"

#include <numeric>

#include "eadem/modules/base/defaults.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/factory/attention_factory.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise.h"
#include "eadem/ops/parallel/select_heads.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

struct KvHeads {
  int64_t own;                                         // on this rank
  std::optional<kernels::SelectHeadsAttrs> selection;  // where the ranks make all of them and keep some
};

// Ranks divide key-value heads where these divide. Else every rank makes all of them and keeps one for each run of its
// query heads that read the same one; runs are as long as one length for all allows.
KvHeads divide_kv_heads(const BuildContext& context, int64_t all_heads, int64_t kv_heads) {
  if (kv_heads % context.num_ranks == 0) return {kv_heads / context.num_ranks, std::nullopt};
  const int64_t heads = all_heads / context.num_ranks, group = all_heads / kv_heads, run = std::gcd(heads, group);
  return {heads / run, kernels::SelectHeadsAttrs{.heads = kv_heads,
                                                 .own_heads = heads / run,
                                                 .first_query = context.rank * heads,
                                                 .run = run,
                                                 .group = group}};
}

}  // namespace

HardwareConfig CausalAttention::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId CausalAttention::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const HardwareConfig& hardware = context.hardware.of(Role::attention, layer_);
  const int64_t heads = context.share(config_.heads, "attention heads");
  const KvHeads kv = divide_kv_heads(context, config_.heads, config_.kv_heads);

  using QkNorm = Config::QkNorm;
  const auto project = [&](const char* name, int64_t all_heads, Parallel parallel) {
    return LinearFactory::build(context,
                                {.name = name,
                                 .in = config_.hidden,
                                 .out = all_heads * config_.head_dim,
                                 .bias = config_.qkv_bias,
                                 .parallel = parallel,
                                 .hardware = &hardware},
                                x);
  };
  const auto normalize = [&](const char* name, QkNorm kind, int64_t size, ValueId value) {
    if (!config_.qk_norm_eps || config_.qk_norm != kind) return value;
    const Graph::Scope scope(graph, name);
    const RmsNorm norm(size, *config_.qk_norm_eps);
    return kind == QkNorm::weightless_after_rope ? norm.build_weightless(context, value)
                                                 : norm.build(context, value, layer_);
  };
  const auto split = [&](const char* name, int64_t own_heads, ValueId flat) {
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{own_heads, config_.head_dim}), {flat});
  };
  const auto rotate = [&](const char* name, ValueId value) {
    const Graph::Scope scope(graph, name);
    return Rope(config_.rope).build(context, value);
  };
  // From a projection to heads that attention takes.
  const auto finish = [&](const char* norm, const char* rope, const char* name, int64_t all_heads, int64_t own_heads,
                          ValueId flat) {
    flat = normalize(norm, QkNorm::whole, all_heads * config_.head_dim, flat);
    const ValueId each = normalize(norm, QkNorm::per_head, config_.head_dim, split(name, own_heads, flat));
    const ValueId rotated = rotate(rope, each);
    return normalize(norm, QkNorm::weightless_after_rope, config_.head_dim,
                     normalize(norm, QkNorm::per_head_after_rope, config_.head_dim, rotated));
  };
  ValueId q =
      finish("q_norm", "q_rope", "q_proj", config_.heads, heads, project("q_proj", config_.heads, Parallel::column));
  if (config_.temperature) {
    const Graph::Scope scope(graph, "q_temperature");
    q = graph.add1(std::make_shared<ops::ScaleByPosition>(*config_.temperature), {q, context.step.positions});
  }
  const auto select = [&](const char* name, ValueId value) {
    if (!kv.selection) return value;
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::SelectHeads>(*kv.selection), {value});
  };
  const Parallel kv_parallel = kv.selection ? Parallel::none : Parallel::column;
  const int64_t made = kv.selection ? config_.kv_heads : kv.own;  // before the selection
  const ValueId k = select("k_heads", finish("k_norm", "k_rope", "k_proj", config_.kv_heads, made,
                                             project("k_proj", config_.kv_heads, kv_parallel)));
  const ValueId v = select("v_heads", split("v_proj", made, project("v_proj", config_.kv_heads, kv_parallel)));

  const ValueId sinks = config_.sinks ? graph.add_parameter(graph.scoped_name("sinks"),
                                                            TensorType(DType::f32, {config_.heads}), /*shard_axis=*/0)
                                      : pipeline::kNoValue;
  const ValueId mixed = AttentionFactory::build(context,
                                                {.heads = heads,
                                                 .kv_heads = kv.own,
                                                 .head_dim = config_.head_dim,
                                                 .scale = config_.scale,
                                                 .window = config_.window,
                                                 .softcap = config_.softcap,
                                                 .sinks = config_.sinks,
                                                 .chunk = config_.chunk,
                                                 .layer = layer_,
                                                 .cache = {}},
                                                {q, k, v, sinks});
  ValueId flat = graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{heads * config_.head_dim}), {mixed});
  if (config_.gated)
    flat =
        graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{kernels::ActivationKind::sigmoid}),
                   {project("g_proj", config_.heads, Parallel::column), flat});
  return LinearFactory::build(context,
                              {.name = "o_proj",
                               .in = config_.heads * config_.head_dim,
                               .out = config_.hidden,
                               .bias = config_.out_bias,
                               .parallel = Parallel::row,
                               .hardware = &hardware},
                              flat);
}

}  // namespace eadem::modules
