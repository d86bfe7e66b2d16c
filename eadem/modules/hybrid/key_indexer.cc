// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/key_indexer.h"

#include <cmath>

#include "eadem/modules/base/layer_norm.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/attention/latent_append.h"
#include "eadem/ops/attention/select_keys.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

constexpr double kKeyNormEps = 1e-6;

}  // namespace

KeyIndexer::KeyIndexer(const Config& config, int64_t hidden, int64_t query_rank, RopeConfig rope, int layer)
    : config_(config), hidden_(hidden), query_rank_(query_rank), rope_(std::move(rope)), layer_(layer) {
  rope_.style = kernels::RopeStyle::rotate_half;
}

ValueId KeyIndexer::project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const {
  return LinearFactory::build(
      context, {.name = name, .in = in, .out = out, .hardware = &context.hardware.of(Role::attention, layer_)}, x);
}

ValueId KeyIndexer::rotate(BuildContext& context, const char* name, int64_t heads, ValueId flat) const {
  const Graph::Scope scope(context.graph, name);
  const std::vector<int64_t> each = {heads, config_.head_dim};
  return Rope(rope_).build(context, context.graph.add1(std::make_shared<ops::Reshape>(each), {flat}));
}

ValueId KeyIndexer::build(BuildContext& context, ValueId x, ValueId latent) const {
  Graph& graph = context.graph;
  const Graph::Scope scope(graph, "indexer");
  const ValueId q = rotate(context, "q_rope", config_.heads,
                           project(context, "wq_b", query_rank_, config_.heads * config_.head_dim, latent));
  const ValueId flat = project(context, "wk", hidden_, config_.head_dim, x);
  const auto normalize = [&](ValueId value) {
    const Graph::Scope norm(graph, "k_norm");
    return LayerNorm(config_.head_dim, kKeyNormEps, /*bias=*/true).build(context, value, layer_);
  };
  ValueId k = rotate(context, "k_rope", 1, normalize(flat));
  const ValueId weights = project(context, "weights_proj", hidden_, config_.heads, x);

  const bool cached = context.cache.layout != CacheLayout::none;
  ValueId block_table = pipeline::kNoValue;
  if (cached) {
    const WeightType& stored = context.hardware.of(Role::attention, layer_).precision.kv_cache.value;
    const DType dtype = stored.encoding == nullptr ? stored.dtype : DType::bf16;
    const ValueId cache = context.add_state(
        {.name = graph.scoped_name("key_cache"), .row = TensorType(dtype, {1, config_.head_dim}), .window = 0});
    k = graph.add1(std::make_shared<ops::LatentAppend>(), {k, context.group_of(0).slots, cache});
    block_table = context.group_of(0).block_table;
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim) * static_cast<double>(config_.heads));
  return graph.add1(std::make_shared<ops::SelectKeys>(kernels::SelectKeysAttrs{
                        .heads = config_.heads,
                        .head_dim = config_.head_dim,
                        .top_k = config_.top_k,
                        .scale = static_cast<float>(scale),
                        .source = cached ? kernels::KvSource::cached : kernels::KvSource::direct}),
                    {q, k, weights, context.step.query_start, context.step.kv_length, block_table});
}

}  // namespace eadem::modules
