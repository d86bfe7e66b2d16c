// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/sparse/native_sparse_attention.h"

#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/modules/factory/attention_factory.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/attention/compress_keys.h"
#include "eadem/ops/attention/compressed_attention.h"
#include "eadem/ops/attention/select_blocks.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/experts/gate_rows.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

kernels::KvSource source_of(const BuildContext& context) {
  return context.cache.layout == CacheLayout::none ? kernels::KvSource::direct : kernels::KvSource::cached;
}

// The table of the compressed rows, which are kept for all tokens.
ValueId rows_table(const BuildContext& context) {
  return context.cache.layout == CacheLayout::none ? pipeline::kNoValue : context.group_of(0).block_table;
}

}  // namespace

std::vector<std::pair<std::string, Shape>> NativeSparseAttention::Config::parameters() const {
  std::vector<std::pair<std::string, Shape>> list = {{"q_proj.weight", {heads * head_dim, hidden}}};
  for (const std::string branch : {"compressed.", "selected.", "window."}) {
    list.push_back({branch + "k_proj.weight", {kv_heads * head_dim, hidden}});
    list.push_back({branch + "v_proj.weight", {kv_heads * value_dim, hidden}});
    list.push_back({branch + "g_proj.weight", {heads, hidden}});
  }
  list.push_back({"compressed.k_weight", {kv_heads, grid.length}});
  list.push_back({"compressed.k_position", {kv_heads, grid.length, head_dim}});
  list.push_back({"compressed.v_weight", {kv_heads, grid.length}});
  list.push_back({"compressed.v_position", {kv_heads, grid.length, value_dim}});
  list.push_back({"o_proj.weight", {hidden, heads * value_dim}});
  return list;
}

ValueId NativeSparseAttention::project(BuildContext& context, const char* name, int64_t in, int64_t out,
                                       ValueId x) const {
  return LinearFactory::build(
      context, {.name = name, .in = in, .out = out, .hardware = &context.hardware.of(Role::attention, layer_)}, x);
}

ValueId NativeSparseAttention::split(BuildContext& context, const char* name, int64_t heads, int64_t width,
                                     ValueId flat) const {
  const Graph::Scope scope(context.graph, name);
  return context.graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{heads, width}), {flat});
}

KvValues NativeSparseAttention::build_kv(BuildContext& context, ValueId x) const {
  const auto heads = [&](const char* name, int64_t width) {
    return split(context, name, config_.kv_heads, width,
                 project(context, name, config_.hidden, config_.kv_heads * width, x));
  };
  const ValueId k = heads("k_proj", config_.head_dim), v = heads("v_proj", config_.value_dim);
  const Graph::Scope scope(context.graph, "k_rope");
  return {Rope(config_.rope).build(context, k), v};
}

ValueId NativeSparseAttention::compress(BuildContext& context, const std::string& name, int64_t width,
                                        ValueId x) const {
  Graph& graph = context.graph;
  const int64_t heads = config_.kv_heads, length = config_.grid.length;
  const auto parameter = [&](const char* kind, std::initializer_list<Dim> dims) {
    return graph.add_parameter(graph.scoped_name(name + kind), TensorType(DType::f32, dims));
  };
  std::vector<ValueId> inputs = {x, parameter("_weight", {heads, length}),
                                 parameter("_position", {heads, length, width}), context.step.query_start,
                                 context.step.kv_length};
  if (context.cache.layout != CacheLayout::none) {
    // Rows stay plain: they are few.
    const WeightType& stored = context.hardware.of(Role::attention, layer_).precision.kv_cache.value;
    const DType dtype = stored.encoding == nullptr ? stored.dtype : DType::bf16;
    const ValueId rows = context.add_state({.name = graph.scoped_name(name + "_rows"),
                                            .row = TensorType(dtype, {heads, width}),
                                            .stride = config_.grid.stride});
    inputs.insert(inputs.end(), {context.group_of(length).block_table, context.group_of(0).slots, rows});
  }
  return graph.add1(std::make_shared<ops::CompressKeys>(kernels::CompressKeysAttrs{
                        .heads = heads, .width = width, .grid = config_.grid, .source = source_of(context)}),
                    std::move(inputs));
}

KvValues NativeSparseAttention::build_rows(BuildContext& context, ValueId x) const {
  KvValues kv = build_kv(context, x);
  if (context.cache.layout != CacheLayout::none)
    kv = KvCacheStore(config_.kv_heads, config_.head_dim, config_.value_dim, config_.grid.length)
             .build(context, kv.k, kv.v, layer_);
  const ValueId k = compress(context, "k", config_.head_dim, kv.k);
  return {k, compress(context, "v", config_.value_dim, kv.v)};
}

ValueId NativeSparseAttention::build_compressed(BuildContext& context, ValueId q, const KvValues& rows) const {
  return context.graph.add1(std::make_shared<ops::CompressedAttention>(
                                kernels::CompressedAttentionAttrs{.heads = config_.heads,
                                                                  .kv_heads = config_.kv_heads,
                                                                  .head_dim = config_.head_dim,
                                                                  .value_dim = config_.value_dim,
                                                                  .scale = static_cast<float>(config_.scale),
                                                                  .grid = config_.grid,
                                                                  .source = source_of(context)}),
                            {q, rows.k, rows.v, context.step.query_start, context.step.kv_length, rows_table(context)});
}

ValueId NativeSparseAttention::build_selection(BuildContext& context, ValueId q, ValueId keys) const {
  return context.graph.add1(
      std::make_shared<ops::SelectBlocks>(kernels::SelectBlocksAttrs{.heads = config_.heads,
                                                                     .kv_heads = config_.kv_heads,
                                                                     .head_dim = config_.head_dim,
                                                                     .scale = static_cast<float>(config_.scale),
                                                                     .grid = config_.grid,
                                                                     .span = config_.span,
                                                                     .top_n = config_.top_n,
                                                                     .first_blocks = config_.first_blocks,
                                                                     .local_blocks = config_.local_blocks,
                                                                     .source = source_of(context)}),
      {q, keys, context.step.query_start, context.step.kv_length, rows_table(context)});
}

ValueId NativeSparseAttention::gate(BuildContext& context, ValueId x, ValueId y) const {
  const std::vector<int64_t> flat = {config_.heads * config_.value_dim};
  return context.graph.add1(std::make_shared<ops::GateRows>(),
                            {context.graph.add1(std::make_shared<ops::Reshape>(flat), {y}),
                             project(context, "g_proj", config_.hidden, config_.heads, x)});
}

ValueId NativeSparseAttention::build(BuildContext& context, ValueId x) const {
  if (context.num_ranks > 1)
    throw Unsupported("native sparse attention is not divided over tensor-parallel ranks; there are {}",
                      context.num_ranks);
  if (config_.window <= 0)
    throw InvalidArgument("native sparse attention: window is {}; expected a positive number", config_.window);
  Graph& graph = context.graph;
  const ValueId heads = split(context, "q_proj", config_.heads, config_.head_dim,
                              project(context, "q_proj", config_.hidden, config_.heads * config_.head_dim, x));
  const auto rotated = [&] {
    const Graph::Scope scope(graph, "q_rope");
    return Rope(config_.rope).build(context, heads);
  };
  const ValueId q = rotated();
  const AttentionRequest request{.heads = config_.heads,
                                 .kv_heads = config_.kv_heads,
                                 .head_dim = config_.head_dim,
                                 .value_dim = config_.value_dim,
                                 .scale = config_.scale,
                                 .layer = layer_,
                                 .cache = {}};
  ValueId selection = pipeline::kNoValue;
  const auto compressed = [&] {
    const Graph::Scope scope(graph, "compressed");
    const KvValues rows = build_rows(context, x);
    selection = build_selection(context, q, rows.k);
    return gate(context, x, build_compressed(context, q, rows));
  };
  const auto attend = [&](const char* branch, const AttentionRequest& own, ValueId chosen) {
    const Graph::Scope scope(graph, branch);
    const KvValues kv = build_kv(context, x);
    return gate(context, x, AttentionFactory::build(context, own, {.q = q, .k = kv.k, .v = kv.v, .selection = chosen}));
  };
  ValueId sum = compressed();
  AttentionRequest selected = request, window = request;
  selected.selected = config_.top_n;
  selected.span = config_.span;
  window.window = config_.window;
  sum = graph.add1(std::make_shared<ops::Add>(), {sum, attend("selected", selected, selection)});
  sum = graph.add1(std::make_shared<ops::Add>(), {sum, attend("window", window, pipeline::kNoValue)});
  return project(context, "o_proj", config_.heads * config_.value_dim, config_.hidden, sum);
}

}  // namespace eadem::modules
