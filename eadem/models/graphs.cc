// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/graphs.h"

namespace eadem::models {

namespace {

BuildContext start(BuiltGraph& built, const GraphOptions& options) {
  BuildContext context{.graph = built.graph,
                       .device = *options.device,
                       .hardware = *options.hardware,
                       .cache = options.cache,
                       .num_ranks = options.num_ranks,
                       .rank = options.rank};
  const auto input = [&](const char* name, DType dtype, std::initializer_list<Dim> dims) {
    return built.graph.add_input(name, TensorType(dtype, dims));
  };
  context.step.token_ids = input("token_ids", DType::i32, {Symbol::tokens});
  context.step.positions = input("positions", DType::i32, {Symbol::tokens});
  context.step.query_start = input("query_start", DType::i32, {Dim(Symbol::sequences, 1)});
  context.step.kv_length = input("kv_length", DType::i32, {Symbol::sequences});
  if (options.cache.layout != modules::CacheLayout::none) {
    context.step.block_table = input("block_table", DType::i32, {Symbol::sequences, Symbol::max_blocks});
    context.step.slots = input("slots", DType::i64, {Symbol::tokens});
  }
  return context;
}

}  // namespace

BuiltGraph build_inference_graph(const Model& model, const GraphOptions& options) {
  EADEM_CHECK(options.cache.layout != modules::CacheLayout::none, "an inference graph needs a cache");
  BuiltGraph built;
  BuildContext context = start(built, options);
  modules::Sampling().feed(context);
  const ValueId hidden = model.build_decoder(context);
  const ValueId rows = built.graph.add_input("logit_rows", TensorType(DType::i32, {Symbol::logit_rows}));
  const ValueId wanted = modules::SelectRows().build(context, hidden, rows);
  const ValueId logits = model.head(context, wanted);
  built.graph.mark_output("hidden", hidden);
  built.graph.mark_output("logits", logits);
  modules::Sampling().build(context, logits);
  built.decisions = std::move(context.decisions);
  return built;
}

BuiltGraph build_training_graph(const Model& model, const GraphOptions& options) {
  EADEM_CHECK(options.cache.layout == modules::CacheLayout::none, "a training graph has no cache");
  BuiltGraph built;
  BuildContext context = start(built, options);
  const ValueId hidden = model.build_decoder(context);
  const ValueId labels = built.graph.add_input("labels", TensorType(DType::i32, {Symbol::tokens}));
  const ValueId logits = model.head(context, hidden);
  built.graph.mark_output("loss", modules::CrossEntropyLoss(model.info().vocab).build(context, logits, labels));
  built.decisions = std::move(context.decisions);
  return built;
}

}  // namespace eadem::models
