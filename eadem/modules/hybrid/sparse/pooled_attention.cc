// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/sparse/pooled_attention.h"

#include <cmath>

#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/factory/attention_factory.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/attention/latent_append.h"
#include "eadem/ops/attention/pooled/pool_keys.h"
#include "eadem/ops/attention/pooled/pooled_attention.h"
#include "eadem/ops/attention/select_keys.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

bool is_cached(const BuildContext& context) { return context.cache.layout != CacheLayout::none; }

kernels::KvSource pool_source(const BuildContext& context) {
  return is_cached(context) ? kernels::KvSource::cached : kernels::KvSource::direct;
}

ValueId split_heads(BuildContext& context, int64_t heads, int64_t width, ValueId x) {
  return context.graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{heads, width}), {x});
}

// Writes the rows of a step into a state of one head, a row for every `stride` tokens.
ValueId keep(BuildContext& context, const char* name, DType dtype, int64_t width, int64_t window, int64_t stride,
             ValueId rows) {
  const ValueId state = context.add_state({.name = context.graph.scoped_name(name),
                                           .row = TensorType(dtype, {int64_t{1}, width}),
                                           .window = window,
                                           .stride = stride});
  const kernels::LatentAppendAttrs attrs{.stride = stride, .block_size = context.cache.block_size};
  return context.graph.add1(std::make_shared<ops::LatentAppend>(attrs), {rows, context.group_of(window).slots, state});
}

RopeConfig of_results(RopeConfig rope) {
  rope.name += "_inverse";
  rope.inverse = true;
  return rope;
}

RopeConfig of_rows(RopeConfig rope, int64_t stride) {
  rope.name += fmt::format("_of_{}", stride);
  rope.stride = stride;
  return rope;
}

}  // namespace

std::vector<std::pair<std::string, Shape>> PooledAttention::Config::parameters() const {
  std::vector<std::pair<std::string, Shape>> list = {
      {"q_a_proj.weight", {query_rank, hidden}},
      {"q_a_norm.weight", {query_rank}},
      {"q_b_proj.weight", {heads * head_dim, query_rank}},
      {"kv_proj.weight", {head_dim, hidden}},
      {"kv_norm.weight", {head_dim}},
      {"sinks", {heads}},
      {"o_a_proj.weight", {groups, output_rank, heads * head_dim / groups}},
      {"o_b_proj.weight", {hidden, groups * output_rank}}};
  const auto add_compressor = [&](const std::string& prefix, int64_t width) {
    list.push_back({prefix + "kv_proj.weight", {parts * width, hidden}});
    list.push_back({prefix + "gate_proj.weight", {parts * width, hidden}});
    list.push_back({prefix + "position_bias", {stride, parts * width}});
    list.push_back({prefix + "kv_norm.weight", {width}});
  };
  if (stride > 0) add_compressor("compressor.", head_dim);
  if (indexer.heads > 0) {
    add_compressor("compressor.indexer.", indexer.head_dim);
    list.push_back({"compressor.indexer.q_b_proj.weight", {indexer.heads * indexer.head_dim, query_rank}});
    list.push_back({"compressor.indexer.weights_proj.weight", {indexer.heads, hidden}});
  }
  return list;
}

std::vector<RopeConfig> PooledAttention::Config::ropes() const {
  std::vector<RopeConfig> list = {rope, of_results(rope)};
  if (stride > 0) list.push_back(of_rows(rope, stride));
  return list;
}

ValueId PooledAttention::project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const {
  return LinearFactory::build(
      context, {.name = name, .in = in, .out = out, .hardware = &context.hardware.of(Role::attention, layer_)}, x);
}

ValueId PooledAttention::normalize(BuildContext& context, const char* name, int64_t size, ValueId x) const {
  const Graph::Scope scope(context.graph, name);
  return RmsNorm(size, config_.norm_eps).build(context, x, layer_);
}

ValueId PooledAttention::rotate(BuildContext& context, const char* name, const RopeConfig& rope, int64_t heads,
                                int64_t width, ValueId x) const {
  const Graph::Scope scope(context.graph, name);
  return Rope(rope).build(context, split_heads(context, heads, width, x));
}

ValueId PooledAttention::build_rows(BuildContext& context, int64_t width, ValueId x) const {
  Graph& graph = context.graph;
  const kernels::PoolKeysAttrs attrs{
      .width = width, .stride = config_.stride, .parts = config_.parts, .source = pool_source(context)};
  const auto columns = [&](const char* name) {
    return split_heads(context, 1, attrs.columns(), project(context, name, config_.hidden, attrs.columns(), x));
  };
  ValueId kv = columns("kv_proj"), gate = columns("gate_proj");
  const ValueId position = graph.add_parameter(graph.scoped_name("position_bias"),
                                               TensorType(DType::f32, {config_.stride, attrs.columns()}));
  std::vector<ValueId> inputs;
  if (is_cached(context)) {
    // They are few, and gates are exponents: they are not rounded.
    kv = keep(context, "kv_window", DType::f32, attrs.columns(), attrs.length(), 1, kv);
    gate = keep(context, "gate_window", DType::f32, attrs.columns(), attrs.length(), 1, gate);
  }
  inputs = {kv, gate, position, context.step.query_start, context.step.kv_length};
  if (is_cached(context)) {
    const GroupValues& group = context.group_of(attrs.length());
    inputs.insert(inputs.end(), {group.block_table, group.slots});
  } else {
    inputs.push_back(pipeline::kNoValue);
  }
  const ValueId pooled = graph.add1(std::make_shared<ops::PoolKeys>(attrs), std::move(inputs));
  const ValueId rows = rotate(context, "rope", of_rows(config_.rope, config_.stride), 1, width,
                              normalize(context, "kv_norm", width, pooled));
  if (!is_cached(context)) return rows;
  const WeightType& stored = context.hardware.of(Role::attention, layer_).precision.kv_cache.value;
  return keep(context, "rows", stored.encoding == nullptr ? stored.dtype : DType::bf16, width, 0, config_.stride, rows);
}

ValueId PooledAttention::build_selection(BuildContext& context, ValueId x, ValueId latent) const {
  const auto& [heads, head_dim, top_k] = config_.indexer;
  const Graph::Scope scope(context.graph, "indexer");
  const ValueId rows = build_rows(context, head_dim, x);
  const ValueId q = rotate(context, "q_rope", config_.rope, heads, head_dim,
                           project(context, "q_b_proj", config_.query_rank, heads * head_dim, latent));
  const ValueId weights = project(context, "weights_proj", config_.hidden, heads, x);
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim) * static_cast<double>(heads));
  const ValueId table = is_cached(context) ? context.group_of(0).block_table : pipeline::kNoValue;
  return context.graph.add1(
      std::make_shared<ops::SelectKeys>(kernels::SelectKeysAttrs{.heads = heads,
                                                                 .head_dim = head_dim,
                                                                 .top_k = top_k,
                                                                 .scale = static_cast<float>(scale),
                                                                 .source = pool_source(context),
                                                                 .stride = config_.stride}),
      {q, rows, weights, context.step.query_start, context.step.kv_length, table});
}

ValueId PooledAttention::attend(BuildContext& context, ValueId x, ValueId latent, ValueId q, ValueId k,
                                ValueId sinks) const {
  if (config_.stride == 0)
    return AttentionFactory::build(context,
                                   {.heads = config_.heads,
                                    .kv_heads = 1,
                                    .head_dim = config_.head_dim,
                                    .value_dim = config_.head_dim,
                                    .latent = true,
                                    .scale = config_.scale,
                                    .window = config_.window,
                                    .sinks = true,
                                    .layer = layer_,
                                    .cache = {}},
                                   {.q = q, .k = k, .v = k, .sinks = sinks});
  ValueId rows = pipeline::kNoValue, selection = pipeline::kNoValue;
  {
    const Graph::Scope scope(context.graph, "compressor");
    rows = build_rows(context, config_.head_dim, x);
    if (config_.indexer.heads > 0) selection = build_selection(context, x, latent);
  }
  const kernels::PooledAttentionAttrs attrs{.heads = config_.heads,
                                            .width = config_.head_dim,
                                            .scale = static_cast<float>(config_.scale),
                                            .window = config_.window,
                                            .stride = config_.stride,
                                            .selected = config_.indexer.heads > 0 ? config_.indexer.top_k : 0,
                                            .source = pool_source(context)};
  std::string text = fmt::format("a window of {} keys and rows of {} tokens, sinks", config_.window, config_.stride);
  if (attrs.selected > 0) text += fmt::format(", the {} rows that an indexer selects", attrs.selected);
  context.decisions.push_back({"attention " + context.graph.scope(), {{"pooled", Verdict::yes(0.0, text)}}, 0});
  const auto& step = context.step;
  std::vector<ValueId> inputs = {q, k, rows, sinks, step.query_start, step.kv_length, pipeline::kNoValue};
  if (is_cached(context)) {
    inputs[1] = KvCacheStore(1, config_.head_dim, config_.head_dim, config_.window).build_latent(context, k, layer_);
    inputs.back() = context.group_of(config_.window).block_table;
    inputs.push_back(context.group_of(0).block_table);
  }
  if (attrs.selected > 0) inputs.push_back(selection);
  return context.graph.add1(std::make_shared<ops::PooledAttention>(attrs), std::move(inputs));
}

ValueId PooledAttention::build(BuildContext& context, ValueId x) const {
  if (context.num_ranks > 1)
    throw Unsupported("attention over pooled rows is not divided over tensor-parallel ranks; there are {}",
                      context.num_ranks);
  Graph& graph = context.graph;
  const int64_t heads = config_.heads, head_dim = config_.head_dim, groups = config_.groups;
  const ValueId latent = normalize(context, "q_a_norm", config_.query_rank,
                                   project(context, "q_a_proj", config_.hidden, config_.query_rank, x));
  const ValueId flat =
      split_heads(context, heads, head_dim, project(context, "q_b_proj", config_.query_rank, heads * head_dim, latent));
  const auto normalized = [&] {
    const Graph::Scope scope(graph, "q_b_norm");
    return RmsNorm(head_dim, config_.norm_eps).build_weightless(context, flat);
  };
  const ValueId q = rotate(context, "q_rope", config_.rope, heads, head_dim, normalized());
  const ValueId k =
      rotate(context, "k_rope", config_.rope, 1, head_dim,
             normalize(context, "kv_norm", head_dim, project(context, "kv_proj", config_.hidden, head_dim, x)));
  const ValueId sinks = graph.add_parameter(graph.scoped_name("sinks"), TensorType(DType::f32, {heads}));
  const ValueId y =
      rotate(context, "y_rope", of_results(config_.rope), heads, head_dim, attend(context, x, latent, q, k, sinks));
  const ValueId mixed = LinearFactory::build_heads(context,
                                                   {.name = "o_a_proj",
                                                    .in = heads * head_dim / groups,
                                                    .out = config_.output_rank,
                                                    .hardware = &context.hardware.of(Role::attention, layer_)},
                                                   groups, split_heads(context, groups, heads * head_dim / groups, y));
  const std::vector<int64_t> all = {groups * config_.output_rank};
  return project(context, "o_b_proj", groups * config_.output_rank, config_.hidden,
                 graph.add1(std::make_shared<ops::Reshape>(all), {mixed}));
}

}  // namespace eadem::modules
