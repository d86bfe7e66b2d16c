// SPDX-License-Identifier: Apache-2.0
//
// Scheduler: decides what each step of an engine computes. It knows requests and the cache's blocks, and neither a
// model nor a device: plan() depends on nothing but the calls before it and the contents of the cache, and commit()
// takes what the step sampled.
//
// A step mixes the next token of every running sequence with chunks of waiting prompts, up to the engine's step size. A
// request's tokens do not depend on the others. Cache space for prompt and answer is reserved when a request starts, so
// a running request never waits for memory.
//
// One sequence may stay in the cache after its request has ended, for a conversation: the next request with `keep` only
// computes what follows the tokens that both begin with, if the windows of the cache still hold what that reads.
// Another request that needs the room takes it.
//
// One thread at a time may use a scheduler, except for check(), which any thread may call.
#pragma once

#include <array>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "eadem/engine/cache/cache_contents.h"
#include "eadem/engine/cache/cache_manager.h"
#include "eadem/engine/request.h"

namespace eadem::engine {

// The limits of an engine, as InferEngine::limits() returns them.
struct SchedulerLimits {
  int64_t max_batch_size = 1;                      // sequences of a step
  int64_t max_num_batched_tokens = 1;              // new tokens of a step; at least max_batch_size
  int64_t max_sequence_length = 1;                 // tokens of a sequence in the cache
  int64_t num_blocks = 1;                          // of the cache's group 0; the rows of a static cache
  int64_t block_size = 1;                          // tokens of a block
  std::vector<modules::WindowGroup> windows = {};  // the cache's other groups
  int64_t num_slots = 0;                           // for states per sequence
  int64_t vocab = 1;
  int64_t model_context = 1;  // tokens; for messages
};

// The outcome of a step for one request.
struct StepEvent {
  RequestId id = 0;
  RequestState state = RequestState::waiting;  // after the step
  int64_t computed = 0;                        // tokens of the request that the step computed
  int64_t reused = 0;                          // in the request's first step: tokens that the cache held already
  bool decoded = false;                        // the step fed back a sampled token; otherwise it read from the prompt
  bool sampled = false;                        // token and logprob are set
  int32_t token = 0;                           // -1: the logits were not finite, and the state is failed
  float logprob = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits);

  // Throws InvalidArgument when the request can never run: empty, longer than the cache, or of unknown tokens.
  void check(const GenerationRequest& request) const;
  // Throws as check() does.
  RequestId add(GenerationRequest request);
  // Ends a waiting or running request as finished, failed or cancelled. Unknown ids, such as those of requests that
  // have ended, are ignored.
  void end(RequestId id, RequestState how);

  // Starts waiting requests that fit and returns the sequences of the next step; none: no request is there. `cache`
  // tells which tokens of a kept sequence the engine still holds. The result is valid until the next call of add, end,
  // plan or commit. A plan that is not committed changes no request: the next one is the same, or,
  // with states per sequence, which a step overwrites, computes its sequences from their first token.
  std::span<const StepSequence> plan(const CacheContents& cache);
  // The requests of the plan, in its order.
  std::span<const RequestId> planned() const { return planned_; }
  // Takes the tokens and log-probabilities that the planned step sampled, one for each sequence that samples. Returns
  // one event for each sequence of the plan; a request whose event says finished or failed is forgotten. The result is
  // valid until the next commit.
  std::span<const StepEvent> commit(std::span<const int32_t> tokens, std::span<const float> logprobs);

  bool is_idle() const { return waiting_.empty() && running_.empty(); }
  // Returns the state of a waiting or running request, and nothing for any other id.
  std::optional<RequestState> state(RequestId id) const;
  // How many requests wait, prefill or decode now, and how many have ended in each way so far.
  int64_t count(RequestState state) const { return counts_[static_cast<size_t>(state)]; }
  int64_t num_free_blocks() const { return cache_.num_free(); }
  const CacheManager& cache() const { return cache_; }
  // Tokens of committed steps: of prompts, and sampled ones that were fed back one by one.
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t decode_tokens() const { return decode_tokens_; }
  // Prompt tokens that requests with `keep` found in the cache so far.
  int64_t reused_tokens() const { return reused_tokens_; }

 private:
  struct Sequence {
    RequestId id = 0;
    RequestState state = RequestState::waiting;
    GenerationRequest request;
    std::vector<int32_t> tokens;  // prompt and sampled tokens
    int64_t cached = 0;           // how many of them are in the cache
    int64_t reused = 0;           // how many were there at the start; 0 once that was reported
    SequenceBlocks blocks;        // its rows or blocks in the cache

    int64_t pending() const { return std::ssize(tokens) - cached; }
    int64_t num_sampled() const { return std::ssize(tokens) - std::ssize(request.prompt); }
  };

  int64_t tokens_for(const GenerationRequest& request) const;
  void move_to(Sequence& sequence, RequestState state);
  void admit(const CacheContents& cache);
  bool has_room(const GenerationRequest& request) const;
  void start(Sequence& sequence, const CacheContents& cache);
  void forget_plan(bool committed = false);
  int64_t plan_sequence(size_t place, int64_t budget);
  StepEvent commit_sequence(Sequence& sequence, const StepSequence& planned);
  void take_token(Sequence& sequence, StepEvent& event, int32_t token, float logprob);
  void release(Sequence& sequence);

  SchedulerLimits limits_;
  CacheManager cache_;
  std::deque<Sequence> waiting_;
  std::vector<Sequence> running_;
  SequenceBlocks kept_;             // of the kept sequence; the cache knows which tokens they hold
  int64_t kept_tokens_ = 0;         // how many they are
  std::vector<StepSequence> plan_;  // reused, like the next three
  std::vector<RequestId> planned_;
  std::vector<size_t> places_;  // of the planned sequences in running_
  std::vector<StepEvent> events_;
  RequestId next_id_ = 1;
  std::array<int64_t, kNumRequestStates> counts_{};
  int64_t prompt_tokens_ = 0;
  int64_t decode_tokens_ = 0;
  int64_t reused_tokens_ = 0;
};

}  // namespace eadem::engine
