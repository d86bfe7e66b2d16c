// SPDX-License-Identifier: Apache-2.0
//
// Proposer: where proposed tokens come from. A step computes them beside the tokens of its sequences, and takes those
// that it samples itself. So nothing that a proposer does changes a token or a log-probability; it decides how many
// steps an answer takes.
//
// Implementations: PromptLookup, DraftModel, MtpHead.
//
// One thread at a time may use a proposer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eadem/engine/request.h"
#include "eadem/engine/step_sequence.h"

namespace eadem::engine {

class InferEngine;

// What is proposed for one request.
struct Proposal {
  RequestId id = 0;
  std::span<const int32_t> tokens;  // of prompt and answer
  const GenerationRequest* request = nullptr;
  int64_t depth = 0;            // how many tokens are wanted, at least 1
  std::vector<int32_t> drafts;  // the answer: at most so many, empty before
};

class Proposer {
 public:
  virtual ~Proposer() = default;

  // The engine has run a step of these requests, of each of which `plan` has a sequence. Whether proposed tokens among
  // its new ones are accepted is not known yet.
  virtual void see(std::span<const RequestId> /*ids*/, std::span<const StepSequence> /*plan*/,
                   const InferEngine& /*engine*/) {}
  // Fills in the drafts of requests, each of which stands there once.
  virtual void propose(std::span<Proposal> proposals) = 0;
  // How many tokens of a request a proposer has to compute before it proposes the first one.
  virtual int64_t backlog(RequestId /*id*/, std::span<const int32_t> /*tokens*/) const { return 0; }
  // What proposing a token costs, in steps of the model, until it was measured.
  virtual double assumed_cost() const { return 0; }
  // A request has ended.
  virtual void end(RequestId /*id*/) {}
};

}  // namespace eadem::engine
