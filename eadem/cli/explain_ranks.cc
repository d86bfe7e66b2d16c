// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/explain_ranks.h"

#include <algorithm>
#include <utility>

#include "eadem/cli/terminal.h"
#include "eadem/core/mesh/planned_rank.h"
#include "eadem/engine/cache/memory_demand.h"
#include "eadem/models/config/model_config.h"
#include "eadem/ops/parallel/virtual_shards.h"

namespace eadem::cli {

namespace {

// Ops that exchange values between ranks, with their number, in the order of the program.
std::vector<std::pair<std::string, int>> exchanges_of(const pipeline::Program& program) {
  std::vector<std::pair<std::string, int>> result;
  for (size_t n = 0; n < program.graph().nodes().size(); ++n) {
    const kernels::Kernel* kernel = program.choices()[n].kernel;
    if (kernel == nullptr || !kernel->name.ends_with("_communicator")) continue;
    const ops::Op& node_op = *program.graph().nodes()[n].op;
    if (const auto* sum = dynamic_cast<const ops::ShardSum*>(&node_op); sum != nullptr && sum->collective().ranks == 1)
      continue;  // every rank has all shards
    const std::string_view op = node_op.name();
    const auto found = std::find_if(result.begin(), result.end(), [&](const auto& each) { return each.first == op; });
    if (found == result.end())
      result.emplace_back(op, 1);
    else
      ++found->second;
  }
  return result;
}

// "0–15 of 64", "none of 2".
std::string range_text(const PartRange& part, int64_t whole) {
  if (part.size == 0) return fmt::format("none of {}", whole);
  return fmt::format("{}–{} of {}", part.begin, part.begin + part.size - 1, whole);
}

io::JsonValue range_json(const PartRange& part) {
  return io::JsonValue::object().set("begin", part.begin).set("size", part.size);
}

}  // namespace

engine::EngineOptions options_of_rank(engine::EngineOptions options, int size, int rank) {
  options.ranks = size == 1 ? nullptr : std::make_shared<PlannedRank>(size, rank);
  return options;
}

RankPlan plan_ranks(const models::Checkpoint& checkpoint, const std::shared_ptr<Device>& device,
                    const engine::EngineOptions& options) {
  const models::Model& model = *checkpoint.model;
  const int size = options.num_ranks();
  RankPlan plan{.axis = options.divide,
                .heads = model.info().heads,
                .experts = model.config() == nullptr ? 0 : model.config()->num_experts};
  for (int rank = 0; rank < size; ++rank) {
    const engine::EngineOptions own = options_of_rank(options, size, rank);
    const engine::ProgramSet programs =
        engine::InferEngine::compile_for_explain(model, device, own, models::spec_of(checkpoint));
    std::vector<pipeline::Program*> all;
    for (const auto& each : programs.programs()) all.push_back(each->program.get());
    const engine::MemoryDemand demand = engine::demand_of(all, pipeline::ParameterStore(device), {});
    plan.shares.push_back(
        {.heads = options.divide == MeshAxis::tp ? part_of(plan.heads, size, rank) : PartRange{0, plan.heads},
         .experts = options.divide == MeshAxis::ep ? part_of(plan.experts, size, rank) : PartRange{0, plan.experts},
         .weights = demand.weights,
         .cache = demand.cache(),
         .activations = demand.activations});
    if (rank == 0) plan.exchanges = exchanges_of(*programs.decode().program);
  }
  return plan;
}

std::string ranks_text(const RankPlan& plan) {
  const auto bytes = [](int64_t count) { return bytes_text(static_cast<double>(count)); };
  std::string text = bold(fmt::format("ranks: {} of {}\n", plan.shares.size(), mesh_axis_name(plan.axis)));
  for (size_t rank = 0; rank < plan.shares.size(); ++rank) {
    const RankShare& share = plan.shares[rank];
    text += fmt::format("  rank {:<3} heads {}{}, weights {}, cache {}, activations {}\n", rank,
                        range_text(share.heads, plan.heads),
                        plan.experts == 0 ? "" : ", experts " + range_text(share.experts, plan.experts),
                        bytes(share.weights), bytes(share.cache), bytes(share.activations));
  }
  std::string list;
  for (const auto& [op, count] : plan.exchanges) list += fmt::format("{}{} {}x", list.empty() ? "" : ", ", op, count);
  return text + fmt::format("  exchanges of a step: {}\n", list.empty() ? "none" : list);
}

io::JsonValue ranks_json(const RankPlan& plan) {
  io::JsonValue shares = io::JsonValue::array();
  for (const RankShare& share : plan.shares)
    shares.push_back(io::JsonValue::object()
                         .set("heads", range_json(share.heads))
                         .set("experts", range_json(share.experts))
                         .set("weight_bytes", share.weights)
                         .set("cache_bytes", share.cache)
                         .set("activation_bytes", share.activations));
  io::JsonValue exchanges = io::JsonValue::object();
  for (const auto& [op, count] : plan.exchanges) exchanges.set(op, count);
  io::JsonValue json = io::JsonValue::object();
  json.set("axis", std::string(mesh_axis_name(plan.axis))).set("shares", std::move(shares));
  return json.set("exchanges", std::move(exchanges));
}

}  // namespace eadem::cli
