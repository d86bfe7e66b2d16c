// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/mla_attention.h"

#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/factory/attention_factory.h"
#include "eadem/ops/attention/latent_attention.h"
#include "eadem/ops/elementwise/columns.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

ValueId reshape(Graph& graph, std::vector<int64_t> trailing, ValueId x) {
  return graph.add1(std::make_shared<ops::Reshape>(std::move(trailing)), {x});
}

ValueId concat(Graph& graph, int64_t columns, ValueId first, ValueId second) {
  return graph.add1(std::make_shared<ops::ConcatColumns>(kernels::ColumnsAttrs{columns}), {first, second});
}

}  // namespace

ValueId MlaAttention::project(BuildContext& context, const LinearRequest& request, ValueId x) const {
  LinearRequest own = request;
  own.hardware = &context.hardware.of(Role::attention, layer_);
  return LinearFactory::build(context, own, x);
}

ValueId MlaAttention::normalize(BuildContext& context, const char* name, int64_t size, ValueId x) const {
  const Graph::Scope scope(context.graph, name);
  return RmsNorm(size, config_.norm_eps).build(context, x, layer_);
}

ValueId MlaAttention::rotate(BuildContext& context, const char* name, ValueId x) const {
  if (!config_.rotated) return x;
  const Graph::Scope scope(context.graph, name);
  return Rope(config_.rope).build(context, x);
}

ValueId MlaAttention::build_query_input(BuildContext& context, ValueId x) const {
  if (config_.query_rank == 0) return x;
  const ValueId low =
      project(context, {.name = "q_a_proj", .in = config_.hidden, .out = config_.query_rank, .bias = config_.bias}, x);
  return normalize(context, "q_a_layernorm", config_.query_rank, low);
}

LinearRequest MlaAttention::key_matrix(BuildContext& context) const {
  return {.name = "k_b_proj",
          .in = config_.nope_dim,
          .out = config_.latent_dim,
          .hardware = &context.hardware.of(Role::attention, layer_)};
}

LinearRequest MlaAttention::value_matrix(BuildContext& context) const {
  return {.name = "v_b_proj",
          .in = config_.latent_dim,
          .out = config_.value_dim,
          .hardware = &context.hardware.of(Role::attention, layer_)};
}

bool MlaAttention::decompresses(const BuildContext& context) const {
  return context.hardware.of(Role::attention, layer_).compute.latent_form.value == LatentForm::decompressed &&
         context.cache.layout != CacheLayout::none && config_.indexer.heads == 0;
}

ValueId MlaAttention::build_query(BuildContext& context, ValueId input) const {
  Graph& graph = context.graph;
  const int64_t out = config_.heads * config_.query_dim(), heads = context.share(config_.heads, "attention heads");
  const bool direct = config_.query_rank == 0;
  const ValueId flat = project(context,
                               {.name = direct ? "q_proj" : "q_b_proj",
                                .in = direct ? config_.hidden : config_.query_rank,
                                .out = out,
                                .parallel = Parallel::column},
                               input);
  const std::vector<ValueId> parts =
      graph.add(std::make_shared<ops::SplitColumns>(kernels::ColumnsAttrs{config_.nope_dim}),
                {reshape(graph, {heads, config_.query_dim()}, flat)});
  const bool whole = decompresses(context);
  const ValueId first =
      whole ? parts[0] : LinearFactory::build_heads(context, key_matrix(context), config_.heads, parts[0]);
  const ValueId query =
      concat(graph, whole ? config_.nope_dim : config_.latent_dim, first, rotate(context, "q_rope", parts[1]));
  if (!config_.temperature) return query;
  const Graph::Scope scope(graph, "q_temperature");
  return graph.add1(std::make_shared<ops::ScaleByPosition>(*config_.temperature), {query, context.step.positions});
}

ValueId MlaAttention::build_row(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const ValueId both = project(
      context, {.name = "kv_a_proj_with_mqa", .in = config_.hidden, .out = config_.row_dim(), .bias = config_.bias}, x);
  const std::vector<ValueId> parts =
      graph.add(std::make_shared<ops::SplitColumns>(kernels::ColumnsAttrs{config_.latent_dim}), {both});
  ValueId latent = normalize(context, "kv_a_layernorm", config_.latent_dim, parts[0]);
  if (config_.latent_scale != 1) {
    const Graph::Scope scope(graph, "kv_a_layernorm");
    const kernels::ScaleAttrs attrs{.factor = static_cast<float>(config_.latent_scale)};
    latent = graph.add1(std::make_shared<ops::Scale>(attrs), {latent});
  }
  const ValueId key = rotate(context, "k_rope", reshape(graph, {1, config_.rope.rotary_dim}, parts[1]));
  return concat(graph, config_.latent_dim, reshape(graph, {1, config_.latent_dim}, latent), key);
}

ValueId MlaAttention::build_in_forms(BuildContext& context, ValueId query, ValueId row) const {
  const HardwareConfig& hardware = context.hardware.of(Role::attention, layer_);
  const kernels::LatentAttentionAttrs attrs{.heads = context.share(config_.heads, "attention heads"),
                                            .latent_dim = config_.latent_dim,
                                            .nope_dim = config_.nope_dim,
                                            .rope_dim = config_.rope.rotary_dim,
                                            .value_dim = config_.value_dim,
                                            .scale = static_cast<float>(config_.scale),
                                            .matmul_input = hardware.precision.matmul_input.value};
  const ValueId rows = KvCacheStore(1, config_.row_dim(), config_.latent_dim, 0).build_latent(context, row, layer_);
  context.decisions.push_back(
      {"attention " + context.graph.scope(),
       {{"latent forms", Verdict::yes(0.0, fmt::format("latent rows of {}, decompressed for the tokens of prompts",
                                                       config_.row_dim()))}},
       0});
  const ValueId to_keys = LinearFactory::head_weight(context, key_matrix(context), config_.heads),
                to_values = LinearFactory::head_weight(context, value_matrix(context), config_.heads);
  return context.graph.add1(std::make_shared<ops::LatentAttention>(attrs),
                            {query, rows, to_keys, to_values, context.step.query_start, context.step.kv_length,
                             context.group_of(0).block_table, context.prompt_length()});
}

ValueId MlaAttention::build_absorbed(BuildContext& context, ValueId x, ValueId input, ValueId query,
                                     ValueId row) const {
  const int64_t heads = context.share(config_.heads, "attention heads");
  const KeyIndexer indexer(config_.indexer, config_.hidden, config_.query_rank, config_.rope, layer_);
  const ValueId selection = config_.indexer.heads > 0 ? indexer.build(context, x, input) : pipeline::kNoValue;
  const ValueId mixed = AttentionFactory::build(context,
                                                {.heads = heads,
                                                 .kv_heads = 1,
                                                 .head_dim = config_.row_dim(),
                                                 .value_dim = config_.latent_dim,
                                                 .latent = true,
                                                 .scale = config_.scale,
                                                 .selected = config_.indexer.heads > 0 ? config_.indexer.top_k : 0,
                                                 .layer = layer_,
                                                 .cache = {}},
                                                {.q = query, .k = row, .v = row, .selection = selection});
  return LinearFactory::build_heads(context, value_matrix(context), config_.heads, mixed);
}

ValueId MlaAttention::build(BuildContext& context, ValueId x) const {
  const int64_t heads = context.share(config_.heads, "attention heads");
  const ValueId input = build_query_input(context, x), query = build_query(context, input), row = build_row(context, x);
  const ValueId values =
      decompresses(context) ? build_in_forms(context, query, row) : build_absorbed(context, x, input, query, row);
  return project(context,
                 {.name = "o_proj",
                  .in = config_.heads * config_.value_dim,
                  .out = config_.hidden,
                  .bias = config_.bias,
                  .parallel = Parallel::row,
                  .in_heads = config_.heads},
                 reshape(context.graph, {heads * config_.value_dim}, values));
}

}  // namespace eadem::modules
