// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <utility>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/scheduler.h"

namespace eadem::engine {

// A scheduler whose steps an engine runs, one by one.
class StepLoop {
 public:
  using Request = GenerationRequest;
  using RequestId = engine::RequestId;
  using Drawn = StepEvent;
  // Returns false to end the request.
  using OnToken = std::function<bool(const Drawn&)>;

  explicit StepLoop(InferEngine& engine) : engine_(engine), scheduler_(engine.limits()) {}

  RequestId add(Request request) { return scheduler_.add(std::move(request)); }
  void cancel(RequestId id) { scheduler_.end(id, RequestState::cancelled); }
  // Runs one step and calls on_token for every sequence that got a token. Returns false when no request is left.
  bool step(const OnToken& on_token, const std::atomic<bool>* cancel = nullptr) {
    const std::span<const StepSequence> plan = scheduler_.plan(engine_.cache_contents());
    if (plan.empty()) return false;
    const InferEngine::Output& output = engine_.forward(plan, cancel);
    for (const StepEvent& event : scheduler_.commit(output.output_ids, output.logprobs))
      if (event.sampled && !on_token(event)) scheduler_.end(event.id, RequestState::finished);
    return !scheduler_.is_idle();
  }

  int64_t num_waiting() const { return scheduler_.count(RequestState::waiting); }
  int64_t num_running() const {
    return scheduler_.count(RequestState::prefilling) + scheduler_.count(RequestState::decoding);
  }
  int64_t prompt_tokens() const { return scheduler_.prompt_tokens(); }
  int64_t decode_tokens() const { return scheduler_.decode_tokens(); }
  int64_t reused_tokens() const { return scheduler_.reused_tokens(); }

 private:
  InferEngine& engine_;
  Scheduler scheduler_;
};

}  // namespace eadem::engine
