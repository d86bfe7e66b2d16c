// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/engine_loop.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace eadem::engine {

// --- A caller.

GenerationStats EngineLoop::run(std::span<Job> jobs, const OnText& on_text, const std::atomic<bool>* cancel) {
  Call call{.jobs = jobs, .cancel = cancel, .wants_text = static_cast<bool>(on_text), .start = Clock::now()};
  std::exception_ptr thrown;
  std::vector<Piece> taken;
  Lock lock(mutex_);
  calls_.push_back(&call);
  while (!call.has_ended() || !call.pieces.empty()) {
    if (!call.pieces.empty()) {
      taken.clear();
      taken.swap(call.pieces);
      deliver(call, taken, on_text, lock, thrown);
    } else if (!driven_) {
      drive(call, lock);
    } else {
      call.asleep = true;
      call.changed.wait(lock);
      call.asleep = false;
    }
  }
  std::erase(calls_, &call);
  if (calls_.empty() && scheduler_.has_ahead()) give_up_ahead();
  wake_a_driver();
  lock.unlock();
  if (thrown) std::rethrow_exception(thrown);
  if (call.failure) std::rethrow_exception(call.failure);
  return call.stats;
}

// Calls `on_text` without the lock.
void EngineLoop::deliver(Call& call, std::span<const Piece> pieces, const OnText& on_text, Lock& lock,
                         std::exception_ptr& thrown) {
  if (call.stopped) return;
  lock.unlock();
  try {
    for (const Piece& piece : pieces) on_text(piece.job, piece.text);
  } catch (...) {
    thrown = std::current_exception();
  }
  lock.lock();
  call.stopped = thrown != nullptr;
}

void EngineLoop::drive(Call& call, Lock& lock) {
  driven_ = true;
  while (!call.has_ended() && call.pieces.empty()) turn(lock);
  driven_ = false;
  wake_a_driver();
}

// Wakes a caller that waits, if nobody drives. Whoever wakes with nothing to drive for wakes the next one.
void EngineLoop::wake_a_driver() {
  if (driven_) return;
  const auto found = std::find_if(calls_.begin(), calls_.end(), [](const Call* call) { return call->asleep; });
  if (found != calls_.end()) (*found)->changed.notify_one();
}

CacheCounters EngineLoop::counters() const {
  const std::lock_guard lock(mutex_);
  return scheduler_.counters();
}

int64_t EngineLoop::num_free_blocks() const {
  const std::lock_guard lock(mutex_);
  return scheduler_.num_free_blocks();
}

// --- The thread that drives.

// Begins new calls, and ends those that were cancelled or stopped.
void EngineLoop::take_commands() {
  for (Call* call : calls_) {
    if (!call->begun) begin(*call);
    if (call->unfinished > 0 && (call->stopped || call->is_cancelled())) end_requests(*call, RequestState::cancelled);
    if (call->has_ended()) call->changed.notify_one();
  }
}

namespace {

std::string what_happened() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

// A processor that throws nothing: it makes the row NaN, and says why in `failure`.
LogitsProcessor guarded(LogitsProcessor processor, std::string& failure) {
  return [processor = std::move(processor), &failure](std::span<const int32_t> tokens, std::span<float> logits) {
    try {
      processor(tokens, logits);
    } catch (...) {
      failure = "a logits processor failed: " + what_happened();
      std::fill(logits.begin(), logits.end(), std::numeric_limits<float>::quiet_NaN());
    }
  };
}

}  // namespace

void EngineLoop::begin(Call& call) {
  call.begun = true;
  call.unfinished = call.jobs.size();
  try {
    for (size_t index = 0; index < call.jobs.size(); ++index) {
      Job& job = call.jobs[index];
      if (job.request.processor) job.request.processor = guarded(std::move(job.request.processor), job.failure);
      owners_.emplace(scheduler_.add(std::move(job.request)), Owner{&call, index});
    }
  } catch (...) {
    call.failure = std::current_exception();
    end_requests(call, RequestState::failed);
  }
}

void EngineLoop::end_requests(Call& call, RequestState how) {
  for (auto owner = owners_.begin(); owner != owners_.end();) {
    if (owner->second.call != &call) {
      ++owner;
      continue;
    }
    scheduler_.end(owner->first, how);
    const size_t job = owner->second.job;
    forget(owner->first);
    owner = owners_.erase(owner);
    // A call that failed throws: nobody reads its texts.
    if (how == RequestState::cancelled) add_piece(call, job, call.jobs[job].output.end(FinishReason::cancelled));
  }
  call.unfinished = 0;
}

// Plans, runs and commits one step.
void EngineLoop::turn(Lock& lock) noexcept {
  take_commands();
  if (scheduler_.is_idle() && !scheduler_.has_ahead()) return;
  const Clock::time_point start = Clock::now();
  try {
    if (!scheduler_.has_ahead()) {
      if (speculator_ != nullptr) propose(lock);
      ask_for_masks(lock);
      if (scheduler_.is_idle()) return;  // their masks failed
    }
    const Clock::time_point planned = Clock::now();
    const InferEngine::Output& output = run_step(lock);
    const double seconds = std::chrono::duration<double>(Clock::now() - planned).count();
    const std::span<const StepEvent> events =
        scheduler_.commit(StepResults{output.output_ids, output.logprobs, output.top_tokens, output.top_logprobs});
    if (speculator_ != nullptr) speculator_->observe(events, seconds);
    publish(events, start);
  } catch (const Cancelled&) {
    if (!lock.owns_lock()) lock.lock();
    // The step has changed nothing, and the next turn ends the requests whose caller asked for it.
    const auto asked = [](const Call* call) { return call->unfinished > 0 && call->is_cancelled(); };
    if (std::none_of(calls_.begin(), calls_.end(), asked)) fail_planned(std::current_exception());
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    give_up_ahead();
    fail_planned(std::current_exception());
  }
}

// Runs the step that is under way, or else a planned one, and gives the next one to the device meanwhile. Has the lock
// when it returns.
const InferEngine::Output& EngineLoop::run_step(Lock& lock) {
  if (!scheduler_.follow_ahead()) {
    const std::span<const StepSequence> plan = scheduler_.plan(engine_.cache_contents());
    const std::atomic<bool>* const cancel = cancel_of_step();
    lock.unlock();
    engine_.submit(plan, cancel);
    lock.lock();
  }
  std::span<const StepSequence> ahead;
  if (runs_ahead_ && !engine_.hooks().has_hooks()) ahead = scheduler_.plan_ahead();
  const std::atomic<bool>* const cancel = cancel_of_step();
  lock.unlock();
  bool is_cancelled = false;
  if (!ahead.empty()) {
    try {
      engine_.submit(ahead, cancel);
    } catch (const Cancelled&) {
      is_cancelled = true;  // the step before counts
    }
  }
  const InferEngine::Output& output = engine_.collect();
  if (speculator_ != nullptr) speculator_->see(scheduler_.planned(), scheduler_.planned_step(), engine_);
  lock.lock();
  if (is_cancelled) scheduler_.forget_ahead();
  return output;
}

// Waits for steps that are under way and forgets them: nobody wants their tokens.
void EngineLoop::give_up_ahead() {
  scheduler_.forget_ahead();
  try {
    engine_.discard_submitted();
  } catch (...) {
    // The device has failed, which the next step says.
  }
}

// Has tokens proposed for the next step.
void EngineLoop::propose(Lock& lock) {
  const std::span<const Draftable> requests = scheduler_.draftable();
  if (requests.empty()) return;
  lock.unlock();
  const std::span<const Proposal> proposals = speculator_->propose(requests);
  lock.lock();
  for (const Proposal& each : proposals) scheduler_.propose(each.id, each.drafts);
}

// Has each request say which tokens may be next that wants to. Its mask may take a while, and ask this loop for its
// counters.
void EngineLoop::ask_for_masks(Lock& lock) {
  const std::span<const Maskable> requests = scheduler_.maskable();
  if (requests.empty()) return;
  // The list ends with the first answer.
  const std::vector<Maskable> all(requests.begin(), requests.end());
  for (const auto& [id, tokens, request] : all) {
    const int64_t vocab = scheduler_.limits().vocab;
    words_ = request->allowed.empty() ? all_tokens(vocab) : request->allowed;
    std::string failure;
    lock.unlock();
    try {
      request->token_mask(tokens, words_);
      if (num_allowed(words_, vocab) == 0)
        failure = fmt::format("the token mask allows no token behind {} tokens", tokens.size());
    } catch (...) {
      failure = "a token mask failed: " + what_happened();
    }
    lock.lock();
    if (failure.empty())
      scheduler_.allow(id, words_);
    else
      fail(id, failure);
  }
}

// Ends one request, alone.
void EngineLoop::fail(RequestId id, const std::string& why) {
  const auto owner = owners_.find(id);
  scheduler_.end(id, RequestState::failed);
  const auto [call, job] = owner->second;
  add_piece(*call, job, call->jobs[job].output.fail(why));
  forget(id);
  owners_.erase(owner);
  if (--call->unfinished == 0 || !call->pieces.empty()) call->changed.notify_one();
}

// Tells the speculator that a request has ended.
void EngineLoop::forget(RequestId id) {
  if (speculator_ != nullptr) speculator_->end(id);
}

// The flag that abandons the step: that of the only call in it. A step that several calls take part in goes on.
const std::atomic<bool>* EngineLoop::cancel_of_step() const {
  const Call* only = nullptr;
  for (const RequestId id : scheduler_.planned()) {
    if (id == 0) continue;  // has ended
    const Call* call = owners_.at(id).call;
    if (only != nullptr && only != call) return nullptr;
    only = call;
  }
  return only == nullptr ? nullptr : only->cancel;
}

// Hands the events of a step to their calls and wakes those that have something to deliver or have ended.
void EngineLoop::publish(std::span<const StepEvent> events, Clock::time_point start) {
  const Clock::time_point now = Clock::now();
  for (const StepEvent& event : events) {
    const auto owner = owners_.find(event.id);
    if (owner == owners_.end()) continue;  // its call has failed with an event before
    Call& call = *owner->second.call;
    Completion& completion = call.jobs[owner->second.job].output.completion();
    completion.cached_tokens += event.reused;
    completion.proposed_tokens += event.proposed;
    completion.accepted_tokens += event.accepted;
    count(call.stats, call.share, event);
    if (event.sampled && call.stats.first_token_seconds == 0)
      call.stats.first_token_seconds = std::chrono::duration<double>(now - call.start).count();
    try {
      take_event(owner, event);
    } catch (...) {
      call.failure = std::current_exception();
      end_requests(call, RequestState::failed);
    }
  }
  const double seconds = std::chrono::duration<double>(now - start).count();
  for (Call* call : calls_) {
    if (call->share == Share::prompt) call->stats.prompt_seconds += seconds;
    if (call->share == Share::decode) call->stats.decode_seconds += seconds;
    call->share = Share::none;
    if (call->has_ended() || !call->pieces.empty()) call->changed.notify_one();
  }
}

void EngineLoop::count(GenerationStats& stats, Share& share, const StepEvent& event) {
  stats.reused_tokens += event.reused;
  stats.proposed_tokens += event.proposed;
  stats.accepted_tokens += event.accepted;
  (event.decoded ? stats.decode_tokens : stats.prompt_tokens) += event.computed;
  if (share != Share::prompt) share = event.decoded ? Share::decode : Share::prompt;
}

void EngineLoop::take_event(Owners::iterator owner, const StepEvent& event) {
  if (!event.sampled && !event.scored) return;
  const auto [call, job] = owner->second;
  OutputProcessor& output = call->jobs[job].output;
  const TopOfRow top{event.top_tokens, event.top_logprobs};
  if (event.scored) return output.take_prompt(event.logprob, top);
  const std::string& failure = call->jobs[job].failure;
  std::string text =
      event.token < 0 && !failure.empty() ? output.fail(failure) : output.take(event.token, event.logprob, top);
  if (output.has_ended())
    scheduler_.end(event.id, RequestState::finished);  // nothing happens if the scheduler has ended it, too
  else if (event.state == RequestState::finished)
    text += output.end(FinishReason::length);
  add_piece(*call, job, std::move(text));
  if (!output.has_ended()) return;
  forget(event.id);
  owners_.erase(owner);
  --call->unfinished;
}

void EngineLoop::add_piece(Call& call, size_t job, std::string text) {
  if (call.wants_text && !text.empty()) call.pieces.push_back({job, std::move(text)});
}

// Ends the calls that take part in a step that threw; all, if it could not be planned.
void EngineLoop::fail_planned(const std::exception_ptr& failure) {
  for (Call* call : calls_)
    if (call->unfinished > 0 && scheduler_.planned().empty()) call->failure = failure;
  for (const RequestId id : scheduler_.planned())
    if (id != 0) owners_.at(id).call->failure = failure;
  for (Call* call : calls_) {
    if (call->unfinished == 0 || call->failure == nullptr) continue;
    end_requests(*call, RequestState::failed);
    call->changed.notify_one();
  }
}

}  // namespace eadem::engine
