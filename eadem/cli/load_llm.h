// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "eadem/cli/options/model_options.h"
#include "eadem/distributed/rank_processes.h"
#include "eadem/engine/llm.h"

namespace eadem::cli {

// The cache length of a session, whose texts are of unknown length; --context asks for a longer one.
inline constexpr int64_t kUsualContext = 4096;

// Adds --context.
void add_context(Arguments& arguments, std::optional<int64_t>& context, const std::string& usual);
// Throws UsageError for a --context below 1.
void check_context(const std::optional<int64_t>& context);
// Throws InvalidArgument for a --context beyond the model's.
void check_context(const std::optional<int64_t>& context, int64_t model_context);

// Throws InvalidArgument for a model that does not divide over the ranks of --tp or --ep.
void check_division(const ModelOptions& options, const models::Model& model);

// Makes an engine with its weights on a rank's device.
using MakeEngine =
    std::function<std::unique_ptr<engine::InferEngine>(std::shared_ptr<Device>, const engine::EngineOptions&)>;

// Starts the ranks of --tp or --ep after the first, which make and follow the engines of this process, and sets the
// ranks of `engine_options`. Returns null for one rank. The ranks must outlive the engines. No device may be open yet.
// A process that a launcher has started as another rank does not return. Throws as check_division().
std::unique_ptr<distributed::RankProcesses> start_ranks(const ModelOptions& options, const models::Model& model,
                                                        engine::EngineOptions& engine_options, const MakeEngine& make);

// A model and the processes that it is divided over; without --tp there are none.
struct LoadedLlm {
  std::unique_ptr<distributed::RankProcesses> ranks;
  std::unique_ptr<engine::LLM> llm;
};

// The sizes of the caches and steps that an engine is made for.
struct Room {
  int64_t context = 0;           // tokens of a sequence; 0: the model's context
  int64_t sequences = 1;         // side by side
  int64_t logit_rows = 0;        // of a step; 0: one per sequence
  bool answers_at_once = false;  // somebody waits for the first token: EngineOptions::pack_after_first_step
};

// Loads a model with a progress bar. Throws Cancelled when the user asks to stop.
LoadedLlm load_llm(models::Checkpoint checkpoint, const ModelOptions& options, const Room& room);

}  // namespace eadem::cli
