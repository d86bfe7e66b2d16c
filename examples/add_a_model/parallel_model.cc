// SPDX-License-Identifier: Apache-2.0
#include "parallel_model.h"

#include <cmath>

#include "eadem/ops/elementwise/elementwise.h"

namespace example {

using namespace eadem;
using models::BuildContext;
using models::ValueId;
using pipeline::Graph;

namespace {

template <typename Build>
ValueId scoped(BuildContext& context, const std::string& name, Build&& build) {
  const Graph::Scope scope(context.graph, name);
  return build();
}

}  // namespace

ParallelModel::ParallelModel(const ParallelConfig& config)
    : config_(config),
      info_{.architecture = "parallel",
            .vocab = config.vocab,
            .hidden = config.hidden,
            .layers = config.layers,
            .heads = config.heads,
            .kv_heads = config.kv_heads,
            .head_dim = config.hidden / config.heads,
            .max_positions = config.max_positions} {}

modules::ModelSpec ParallelModel::spec() const {
  return {.hidden = config_.hidden,
          .ffn = config_.ffn,
          .layers = config_.layers,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_dim = info_.head_dim,
          .vocab = config_.vocab};
}

ValueId ParallelModel::embed(BuildContext& context) const {
  modules::Rope({.rotary_dim = info_.head_dim}).build_table(context);
  return scoped(context, "embed", [&] {
    return modules::Embedding(config_.vocab, config_.hidden).build(context, context.step.token_ids);
  });
}

ValueId ParallelModel::layer(BuildContext& context, int index, ValueId x) const {
  Graph& graph = context.graph;
  const Graph::Scope scope(graph, "layers." + std::to_string(index), index);
  const ValueId in = scoped(
      context, "norm", [&] { return modules::RmsNorm(config_.hidden, config_.norm_eps).build(context, x, index); });
  const ValueId attended = scoped(context, "attn", [&] {
    return modules::CausalAttention({.hidden = config_.hidden,
                                     .heads = config_.heads,
                                     .kv_heads = config_.kv_heads,
                                     .head_dim = info_.head_dim,
                                     .scale = 1 / std::sqrt(static_cast<double>(info_.head_dim)),
                                     .rope = {.rotary_dim = info_.head_dim}},
                                    index)
        .build(context, in);
  });
  const ValueId transformed = scoped(context, "mlp", [&] {
    return modules::DenseMlp({.hidden = config_.hidden, .ffn = config_.ffn}, index).build(context, in);
  });
  const ValueId both = graph.add1(std::make_shared<ops::Add>(), {attended, transformed});
  return graph.add1(std::make_shared<ops::Add>(), {x, both});
}

ValueId ParallelModel::finish(BuildContext& context, ValueId x) const {
  return scoped(context, "norm", [&] { return modules::RmsNorm(config_.hidden, config_.norm_eps).build(context, x); });
}

ValueId ParallelModel::head(BuildContext& context, ValueId hidden) const {
  return modules::LmHead(config_.vocab, config_.hidden, "lm_head.weight", /*tied=*/false).build(context, hidden);
}

io::JsonValue ParallelModel::config_json() const {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "parallel").set("vocab_size", config_.vocab).set("hidden_size", config_.hidden);
  json.set("intermediate_size", config_.ffn).set("num_hidden_layers", config_.layers);
  json.set("num_attention_heads", config_.heads).set("num_key_value_heads", config_.kv_heads);
  return json.set("max_position_embeddings", config_.max_positions).set("rms_norm_eps", config_.norm_eps);
}

}  // namespace example
