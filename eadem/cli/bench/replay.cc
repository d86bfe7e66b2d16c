// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/bench/replay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <unordered_map>

#include "eadem/core/error.h"

namespace eadem::cli {

namespace {

using Clock = std::chrono::steady_clock;
using engine::RequestState;

class Replayer {
 public:
  Replayer(engine::InferEngine& engine, engine::Speculator* speculator, const Workload& workload,
           const std::atomic<bool>* cancel, const OnReplay& on_replay)
      : engine_(engine),
        speculator_(speculator),
        workload_(workload),
        cancel_(cancel),
        on_replay_(on_replay),
        scheduler_(engine.limits()) {}

  Replay run() {
    while (std::ssize(replay_.requests) < num_requests() || !scheduler_.is_idle()) {
      if (cancel_ != nullptr && cancel_->load()) {
        replay_.stopped = true;
        break;
      }
      take_arrivals();
      if (scheduler_.is_idle())
        sleep();
      else
        step();
      if (on_replay_) on_replay_(replay_, running(), waiting());
    }
    engine_.discard_submitted();
    replay_.counters = scheduler_.counters();
    replay_.proposed_tokens = scheduler_.proposed_tokens();
    replay_.accepted_tokens = scheduler_.accepted_tokens();
    replay_.computed_tokens = scheduler_.prompt_tokens() + scheduler_.decode_tokens();
    replay_.blocks_in_use = scheduler_.limits().num_blocks - scheduler_.num_free_blocks();
    return std::move(replay_);
  }

 private:
  int64_t num_requests() const { return std::ssize(workload_.requests()); }
  int64_t running() const {
    return scheduler_.count(RequestState::prefilling) + scheduler_.count(RequestState::decoding);
  }
  int64_t waiting() const {
    return scheduler_.count(RequestState::waiting) + scheduler_.count(RequestState::preempted);
  }
  double now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void take_arrivals() {
    const double time = now();
    while (std::ssize(replay_.requests) < num_requests()) {
      const size_t index = replay_.requests.size();
      const TraceRequest& request = workload_.requests()[index];
      if (request.seconds > time) return;
      const engine::RequestId id = scheduler_.add(
          {.prompt = workload_.prompt(index, scheduler_.limits().vocab), .max_tokens = request.generated_tokens});
      owners_.emplace(id, index);
      replay_.requests.push_back({.arrival = request.seconds, .prompt_tokens = request.prompt_tokens});
      replay_.prompt_tokens += request.prompt_tokens;
    }
  }

  // Sleeps until the next request comes, or for a moment, to look at `cancel`.
  void sleep() {
    constexpr double kMoment = 0.05;
    const double left = workload_.requests()[replay_.requests.size()].seconds - now();
    std::this_thread::sleep_for(std::chrono::duration<double>(std::clamp(left, 0.0, kMoment)));
  }

  void step() {
    const bool is_under_way = scheduler_.follow_ahead();
    if (!is_under_way) {
      if (speculator_ != nullptr) propose();
      scheduler_.plan(engine_.cache_contents());
    }
    replay_.most_running = std::max(replay_.most_running, running());
    replay_.most_waiting = std::max(replay_.most_waiting, waiting());
    const Clock::time_point planned = Clock::now();
    try {
      if (!is_under_way) engine_.submit(scheduler_.planned_step(), cancel_);
      if (engine_.device()->is_asynchronous())
        if (const auto ahead = scheduler_.plan_ahead(); !ahead.empty()) engine_.submit(ahead, cancel_);
      const engine::InferEngine::Output& output = engine_.collect();
      if (speculator_ != nullptr) speculator_->see(scheduler_.planned(), scheduler_.planned_step(), engine_);
      const double seconds = std::chrono::duration<double>(Clock::now() - planned).count();
      const std::span<const engine::StepEvent> events = scheduler_.commit(output.output_ids, output.logprobs);
      if (speculator_ != nullptr) speculator_->observe(events, seconds);
      ++replay_.steps;
      replay_.seconds = now();
      for (const engine::StepEvent& event : events) take(event);
    } catch (const Cancelled&) {
      replay_.stopped = true;  // run() sees the flag, too
    }
  }

  void propose() {
    const std::span<const engine::Draftable> requests = scheduler_.draftable();
    if (requests.empty()) return;
    for (const engine::Proposal& each : speculator_->propose(requests)) scheduler_.propose(each.id, each.drafts);
  }

  void take(const engine::StepEvent& event) {
    const auto owner = owners_.find(event.id);
    ReplayedRequest& request = replay_.requests[owner->second];
    request.cached_tokens += event.reused;
    replay_.cached_tokens += event.reused;
    if (event.sampled && event.token >= 0) {
      if (request.drawn == 0)
        request.first = replay_.seconds;
      else
        replay_.gaps.push_back(replay_.seconds - request.last);
      request.last = replay_.seconds;
      ++request.drawn;
      ++replay_.drawn;
    }
    if (event.state != RequestState::finished && event.state != RequestState::failed) return;
    request.finished = event.state == RequestState::finished;
    ++(request.finished ? replay_.finished : replay_.failed);
    if (speculator_ != nullptr) speculator_->end(event.id);
    owners_.erase(owner);
  }

  engine::InferEngine& engine_;
  engine::Speculator* speculator_;
  const Workload& workload_;
  const std::atomic<bool>* cancel_;
  const OnReplay& on_replay_;
  engine::Scheduler scheduler_;
  Replay replay_;
  std::unordered_map<engine::RequestId, size_t> owners_;  // indices of requests that have not ended
  const Clock::time_point start_ = Clock::now();
};

}  // namespace

Replay replay(engine::InferEngine& engine, engine::Speculator* speculator, const Workload& workload,
              const std::atomic<bool>* cancel, const OnReplay& on_replay) {
  return Replayer(engine, speculator, workload, cancel, on_replay).run();
}

double percentile(std::span<const double> sorted, double part) {
  EADEM_CHECK(!sorted.empty(), "{} values", sorted.size());
  const double rank = std::ceil(part * static_cast<double>(sorted.size()));
  const auto index = static_cast<int64_t>(rank) - 1;
  return sorted[static_cast<size_t>(std::clamp<int64_t>(index, 0, std::ssize(sorted) - 1))];
}

}  // namespace eadem::cli
