// SPDX-License-Identifier: Apache-2.0
//
// Speculator: what an EngineLoop asks for proposed tokens. It has a proposer, and a controller that says how many are
// wanted, and it measures what both take. One thread at a time may use it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "eadem/engine/scheduler.h"
#include "eadem/engine/speculation/depth_controller.h"
#include "eadem/engine/speculation/proposer.h"

namespace eadem::engine {

class Speculator {
 public:
  // `most_depth`: tokens of a sequence in a step; `most_drafts`: of all sequences together; `recomputes`: see
  // DepthController.
  Speculator(std::unique_ptr<Proposer> proposer, int64_t most_depth, int64_t most_drafts, bool recomputes = false);

  // Returns what is proposed for requests of Scheduler::draftable(). Valid until the next call.
  std::span<const Proposal> propose(std::span<const Draftable> requests);
  // Shows the proposer a step that was run.
  void see(std::span<const RequestId> ids, std::span<const StepSequence> plan, const InferEngine& engine) {
    proposer_->see(ids, plan, engine);
  }
  // Takes the events of a step, which took so long.
  void observe(std::span<const StepEvent> events, double seconds);
  // A request has ended.
  void end(RequestId id);

  const DepthController& controller() const { return controller_; }

 private:
  std::unique_ptr<Proposer> proposer_;
  DepthController controller_;
  int64_t most_drafts_;
  std::vector<DepthController::Sequence> sequences_;
  std::vector<DepthController::Outcome> outcomes_;
  std::vector<Proposal> proposals_;  // kept with the memory of their drafts
};

}  // namespace eadem::engine
