// SPDX-License-Identifier: Apache-2.0
//
// Shows, for `eadem explain`, what each rank of --tp or --ep would hold. Nothing is run and nothing is sent.
#pragma once

#include <string>
#include <vector>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/json.h"

namespace eadem::cli {

struct RankShare {
  PartRange heads;          // of attention: all, unless tensors are divided
  PartRange experts;        // whose rows it computes; empty in a model without experts
  int64_t weights = 0;      // bytes, in the layouts that its programs read
  int64_t cache = 0;        // bytes
  int64_t activations = 0;  // bytes
};

struct RankPlan {
  MeshAxis axis = MeshAxis::tp;
  int64_t heads = 0, experts = 0;  // of the model
  std::vector<RankShare> shares;   // by rank
  // The ops that exchange values in a decode step of one rank, with their number; a prefill step has the same.
  std::vector<std::pair<std::string, int>> exchanges;
};

// The options of one of `size` ranks, which is compiled for, not run.
engine::EngineOptions options_of_rank(engine::EngineOptions options, int size, int rank);

// Compiles the programs of every rank. `options` are those of any of them.
RankPlan plan_ranks(const models::Checkpoint& checkpoint, const std::shared_ptr<Device>& device,
                    const engine::EngineOptions& options);

std::string ranks_text(const RankPlan& plan);
io::JsonValue ranks_json(const RankPlan& plan);

}  // namespace eadem::cli
