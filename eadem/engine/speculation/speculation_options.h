// SPDX-License-Identifier: Apache-2.0
//
// SpeculationOptions: whether an LLM has tokens proposed, and by whom.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "eadem/core/log.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/engine/speculation/speculator.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::engine {

struct SpeculationOptions {
  enum class Proposer : uint8_t {
    none,
    lookup,  // PromptLookup
    model,   // DraftModel
    mtp,     // MtpHead
  };
  Proposer proposer = Proposer::none;
  std::string model;         // the path of the draft model, as in models::open_checkpoint
  int64_t draft_tokens = 8;  // [1, 15], most proposed tokens of a sequence in a step

  // "none", "lookup", "mtp", or else the path of a draft model. Throws InvalidArgument for "" and for a number out of
  // range.
  static SpeculationOptions of(std::string_view what, int64_t draft_tokens = 8);

  // What EngineOptions::draft_tokens of the engine has to be.
  int64_t room() const { return proposer == Proposer::none ? 0 : draft_tokens; }
};

// Refuses what make_speculator would, before any weight is read, as far as options, configuration and the names of
// tensors tell. Throws Unsupported for a checkpoint without an MTP head (models::why_no_mtp), and for a head with ops
// that `device` has no kernels for, naming them.
void require_proposer(const SpeculationOptions& options, const models::Checkpoint& checkpoint,
                      const std::shared_ptr<Device>& device, const EngineOptions& engine_options);

// Throws Unsupported, naming the first token that differs and what it is in both, unless two models have the same
// tokens.
void require_same_tokens(const io::Tokenizer& model, const io::Tokenizer& draft);

// Opens the draft model, or the MTP head of `checkpoint`, which `engine` was made of, if one is wanted, on the device
// of `engine`: beside several ranks on rank 0, which has all of it. Returns null where nothing proposes. Throws
// Unsupported when the draft model has other tokens than `tokenizer`, and when the checkpoint has no MTP head
// (models::why_no_mtp). `progress` and `log` are as for LLM.
std::unique_ptr<Speculator> make_speculator(const SpeculationOptions& options, const models::Checkpoint& checkpoint,
                                            const InferEngine& engine, const io::Tokenizer& tokenizer,
                                            const Logger& log, const std::function<void(int64_t, int64_t)>& progress);

}  // namespace eadem::engine
