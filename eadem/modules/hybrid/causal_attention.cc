// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/causal_attention.h"

#include "eadem/modules/base/defaults.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/factory/attention_factory.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

HardwareConfig CausalAttention::default_hw_config(const Device& device, HardwareMode mode, const ModelSpec&) {
  return matrix_defaults(device, mode);
}

ValueId CausalAttention::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const HardwareConfig& hardware = context.hardware.of(Role::attention, layer_);
  const int64_t heads = context.share(config_.heads, "attention heads");
  const int64_t kv_heads = context.share(config_.kv_heads, "key-value heads");

  const auto project = [&](const char* name, int64_t all_heads, int64_t own_heads) {
    const ValueId flat = LinearFactory::build(context,
                                              {.name = name,
                                               .in = config_.hidden,
                                               .out = all_heads * config_.head_dim,
                                               .bias = config_.qkv_bias,
                                               .parallel = Parallel::column,
                                               .hardware = &hardware},
                                              x);
    const Graph::Scope scope(graph, name);
    return graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{own_heads, config_.head_dim}), {flat});
  };
  const auto normalize = [&](const char* name, ValueId value) {
    if (!config_.qk_norm_eps) return value;
    const Graph::Scope scope(graph, name);
    return RmsNorm(config_.head_dim, *config_.qk_norm_eps).build(context, value, layer_);
  };
  const auto rotate = [&](const char* name, ValueId value) {
    const Graph::Scope scope(graph, name);
    return Rope(config_.rope).build(context, value);
  };
  const ValueId q = rotate("q_rope", normalize("q_norm", project("q_proj", config_.heads, heads)));
  const ValueId k = rotate("k_rope", normalize("k_norm", project("k_proj", config_.kv_heads, kv_heads)));
  const ValueId v = project("v_proj", config_.kv_heads, kv_heads);

  const ValueId mixed = AttentionFactory::build(context,
                                                {.heads = heads,
                                                 .kv_heads = kv_heads,
                                                 .head_dim = config_.head_dim,
                                                 .scale = config_.scale,
                                                 .window = config_.window,
                                                 .layer = layer_,
                                                 .cache = {}},
                                                q, k, v);
  const ValueId flat =
      graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{heads * config_.head_dim}), {mixed});
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
