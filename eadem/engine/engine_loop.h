// SPDX-License-Identifier: Apache-2.0
//
// EngineLoop: plans a step, runs it and commits it, for the requests of any number of callers. Requests of all callers
// share steps; the tokens of each are those that it would get alone.
//
// The loop has no thread of its own. Of the callers that wait for their requests, one drives: its thread runs the steps
// for all of them until it has text to deliver or its own requests have ended, and then another one drives. So a lone
// caller pays no hand-over between threads, nothing runs between calls, and a process without calls may fork or end at
// any time. A caller's callback runs on its own thread and never while it drives: one that is slow, or waits for
// another caller, holds up nobody else's steps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/speculation/speculator.h"
#include "eadem/engine/text/output_processor.h"

namespace eadem::engine {

class EngineLoop {
 public:
  // A request and what becomes of it.
  struct Job {
    GenerationRequest request;
    OutputProcessor output;
    std::string failure = {};  // why the request's processor failed
  };
  // Called with the index of the job when more of its text is complete; `piece` is not empty.
  using OnText = std::function<void(size_t job, std::string_view piece)>;

  // Nobody else may run steps of the engine, or change its cache, while a call is under way. Without a speculator
  // nothing is proposed. With `runs_ahead` the device is given a step before the results of the one before it are read,
  // where that is possible (Scheduler::plan_ahead). By default an asynchronous device is. Tokens are the same.
  explicit EngineLoop(InferEngine& engine, std::unique_ptr<Speculator> speculator = nullptr,
                      std::optional<bool> runs_ahead = {})
      : engine_(engine),
        scheduler_(engine.limits()),
        speculator_(std::move(speculator)),
        runs_ahead_(runs_ahead.value_or(engine.device()->is_asynchronous())) {}

  // Throws InvalidArgument when the request can never run. Any thread, at any time.
  void check(const GenerationRequest& request) const { scheduler_.check(request); }

  // Runs jobs, whose requests passed check(), to their ends; their outputs then hold the completions. Any number of
  // threads may call it at once. Once `cancel` is set (from any thread), the requests end as cancelled before the next
  // step, with the tokens so far; a step that no other call takes part in is abandoned. When `on_text` throws, the
  // requests of this call end, `on_text` is not called again, and the exception is rethrown. When a step throws, the
  // calls that take part in it end with its exception.
  GenerationStats run(std::span<Job> jobs, const OnText& on_text = {}, const std::atomic<bool>* cancel = nullptr);

  // What requests found in the cache so far, and what that took. Any thread, at any time.
  CacheCounters counters() const;
  // Blocks of the cache that no request and no kept conversation holds, between two steps. Any thread, at any time.
  int64_t num_free_blocks() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Piece {
    size_t job;
    std::string text;
  };

  // The part that a call's requests have in a step.
  enum class Share : uint8_t { none, decode, prompt };

  // A run() under way. The driving thread uses it under the mutex.
  struct Call {
    std::span<Job> jobs;
    const std::atomic<bool>* cancel;
    bool wants_text;
    Clock::time_point start;
    size_t unfinished = 0;       // jobs that have not ended
    bool begun = false;          // its requests are with the scheduler
    bool stopped = false;        // its callback threw
    bool asleep = false;         // its thread waits for `changed`
    std::exception_ptr failure;  // of the loop, on behalf of this call
    std::vector<Piece> pieces;   // not delivered
    Share share = Share::none;
    GenerationStats stats;
    std::condition_variable changed;  // pieces, the end, or nobody drives

    bool has_ended() const { return begun && unfinished == 0; }
    bool is_cancelled() const { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }
  };

  // The call and the job that a request belongs to.
  struct Owner {
    Call* call;
    size_t job;
  };

  using Owners = std::unordered_map<RequestId, Owner>;

  using Lock = std::unique_lock<std::mutex>;
  static void deliver(Call& call, std::span<const Piece> pieces, const OnText& on_text, Lock& lock,
                      std::exception_ptr& thrown);
  void drive(Call& call, Lock& lock);
  void wake_a_driver();
  void take_commands();
  void begin(Call& call);
  void end_requests(Call& call, RequestState how);
  void turn(Lock& lock) noexcept;
  const InferEngine::Output& run_step(Lock& lock);
  void give_up_ahead();
  void propose(Lock& lock);
  void ask_for_masks(Lock& lock);
  void fail(RequestId id, const std::string& why);
  void forget(RequestId id);
  const std::atomic<bool>* cancel_of_step() const;
  void publish(std::span<const StepEvent> events, Clock::time_point start);
  static void count(GenerationStats& stats, Share& share, const StepEvent& event);
  void take_event(Owners::iterator owner, const StepEvent& event);
  void fail_planned(const std::exception_ptr& failure);
  static void add_piece(Call& call, size_t job, std::string text);

  InferEngine& engine_;                     // the driving thread uses it, without the mutex
  Scheduler scheduler_;                     // likewise during a step, otherwise under the mutex; but see check()
  std::unique_ptr<Speculator> speculator_;  // likewise; may be null
  std::vector<int32_t> words_;              // likewise; of a mask
  bool runs_ahead_;
  mutable std::mutex mutex_;  // guards what follows and all calls
  std::vector<Call*> calls_;
  Owners owners_;
  bool driven_ = false;  // some thread drives
};

}  // namespace eadem::engine
