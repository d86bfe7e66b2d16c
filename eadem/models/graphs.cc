// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/graphs.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace eadem::models {

namespace {

// Borders of the first of these counts part a sum first: then what a rank of 2 or of 4 has is one term of the sum.
constexpr int kRankCounts[] = {2, 4, 3};

std::vector<int> rank_counts_of(const ModelInfo& model) {
  std::vector<int> counts;
  for (const int ranks : kRankCounts)
    if (model.heads % ranks == 0) counts.push_back(ranks);
  return counts;
}

BuildContext start(BuiltGraph& built, const GraphOptions& options) {
  BuildContext context{.graph = built.graph,
                       .device = *options.device,
                       .hardware = *options.hardware,
                       .cache = options.cache,
                       .num_ranks = options.num_ranks,
                       .rank = options.rank,
                       .expert_ranks = options.expert_ranks,
                       .expert_rank = options.expert_rank,
                       .own_tokens = options.cache.layout == modules::CacheLayout::none,
                       .longest_sequence = options.longest_sequence};
  const auto input = [&](const std::string& name, DType dtype, std::initializer_list<Dim> dims) {
    return built.graph.add_input(name, TensorType(dtype, dims));
  };
  context.step.token_ids = input("token_ids", DType::i32, {Symbol::tokens});
  context.step.positions = input("positions", DType::i32, {Symbol::tokens});
  context.step.query_start = input("query_start", DType::i32, {Dim(Symbol::sequences, 1)});
  context.step.kv_length = input("kv_length", DType::i32, {Symbol::sequences});
  if (options.cache.layout == modules::CacheLayout::none) return context;
  for (size_t group = 0; group < options.cache.num_groups(); ++group) {
    const auto name = [&](const char* of_all) { return modules::group_input(options.cache, group, of_all); };
    context.step.groups.push_back(
        {.block_table = input(name("block_table"), DType::i32, {Symbol::sequences, Symbol::max_blocks}),
         .slots = input(name("slots"), DType::i64, {Symbol::tokens})});
  }
  if (options.cache.num_slots > 0) context.step.state_slots = input("state_slots", DType::i32, {Symbol::sequences});
  return context;
}

ValueId build_layers(const Model& model, BuildContext& context) {
  const ValueId x = model.build_layers(context);
  if (context.expert_ranks > 1 && context.routers.empty())
    throw InvalidArgument("{} ranks to divide experts; the model has none", context.expert_ranks);
  return x;
}

}  // namespace

std::vector<int> same_bits_on(const ModelInfo& model) {
  std::vector<int> counts = rank_counts_of(model);
  counts.push_back(1);
  std::sort(counts.begin(), counts.end());
  return counts;
}

void require_same_bits_on(const ModelInfo& model, int num_ranks) {
  const std::vector<int> counts = same_bits_on(model);
  if (std::find(counts.begin(), counts.end(), num_ranks) == counts.end())
    throw InvalidArgument(
        "deterministic_across_tp gives the same bits on {} ranks of a model with {} attention heads; there are {}",
        fmt::join(counts, ", "), model.heads, num_ranks);
}

BuiltGraph build_inference_graph(const Model& model, const GraphOptions& options) {
  EADEM_CHECK(options.cache.layout != modules::CacheLayout::none, "an inference graph needs a cache");
  BuiltGraph built;
  BuildContext context = start(built, options);
  if (options.deterministic_across_tp) {
    require_same_bits_on(model.info(), options.num_ranks);
    context.same_bits_on = rank_counts_of(model.info());
  }
  modules::Sampling().feed(context);
  const ValueId x = build_layers(model, context), hidden = model.finish(context, x);
  const ValueId rows = built.graph.add_input("logit_rows", TensorType(DType::i32, {Symbol::logit_rows}));
  const ValueId wanted = modules::SelectRows().build(context, hidden, rows);
  const ValueId logits = model.head(context, wanted);
  built.graph.mark_output("hidden", hidden);
  if (const ValueId read = model.mtp_hidden(x, hidden); read != hidden) built.graph.mark_output("mtp_hidden", read);
  built.graph.mark_output("logits", logits);
  modules::Sampling().build(context, logits);
  built.decisions = std::move(context.decisions);
  built.states = std::move(context.states);
  return built;
}

BuiltGraph build_training_graph(const Model& model, const GraphOptions& options) {
  EADEM_CHECK(options.cache.layout == modules::CacheLayout::none, "a training graph has no cache");
  if (options.deterministic_across_tp)
    throw Unsupported("deterministic_across_tp is for serving; this is a graph for training on {} ranks",
                      options.num_ranks);
  BuiltGraph built;
  BuildContext context = start(built, options);
  const ValueId hidden = model.finish(context, build_layers(model, context));
  const ValueId labels = built.graph.add_input("labels", TensorType(DType::i32, {Symbol::tokens}));
  const ValueId logits = model.head(context, hidden);
  built.graph.mark_output("loss", modules::CrossEntropyLoss(model.info().vocab).build(context, logits, labels));
  if (options.load_balancing_loss)
    built.graph.mark_output("load_balancing_loss", modules::LoadBalancingLoss().build(context));
  built.decisions = std::move(context.decisions);
  return built;
}

std::vector<modules::StateSpec> states_of(const Model& model, const Device& device,
                                          const modules::AutoHardwareConfig& hardware, int num_ranks, int rank) {
  // What is declared does not depend on where it is stored.
  return build_inference_graph(
             model, {.device = &device,
                     .hardware = &hardware,
                     .cache = {.layout = modules::CacheLayout::paged, .num_blocks = 1, .block_size = 1, .num_slots = 1},
                     .num_ranks = num_ranks,
                     .rank = rank})
      .states;
}

}  // namespace eadem::models
