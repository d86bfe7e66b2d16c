// SPDX-License-Identifier: Apache-2.0
//
// Scheduler: turns requests (token ids in, token ids out) into engine steps. Each step mixes the next token of every
// running sequence with chunks of waiting prompts, up to the engine's step size. A request's tokens do not depend on
// the others.
//
// A request that cannot fit the cache is refused alone, when it is added. Cache space for prompt and answer is reserved
// when a request starts, so a running request never waits for memory.
//
// One sequence may stay in the cache after its request has ended, for a conversation: the next request with `keep` only
// computes what follows the tokens that both begin with. Another request that needs the room takes it.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "eadem/engine/infer_engine.h"

namespace eadem::engine {

class Scheduler {
 public:
  using RequestId = int64_t;

  struct Request {
    std::vector<int32_t> prompt;  // at least one token
    SamplingInput sampling;       // greedy unless set; its prompt_length is set by `add`
    int64_t max_tokens = 1;
    bool keep = false;  // continue from the kept sequence, and become it at the end
  };

  // A sampled token. Its callback returns false to end the request (a stop condition is met).
  struct Drawn {
    RequestId id;
    int32_t token;  // -1: the logits were not finite; the request has ended
    float logprob;
    bool last;  // max_tokens or the end of the context is reached, or the request failed
  };
  using OnToken = std::function<bool(const Drawn&)>;

  explicit Scheduler(InferEngine& engine);

  // Throws InvalidArgument when the request can never run: empty, or longer than the cache.
  RequestId add(Request request);
  // Runs one step and calls on_token once for every sequence that got a token; a sequence whose prompt continues gets
  // none. Returns false when no request is waiting or running. `cancel` is as in InferEngine::forward; no request has
  // changed when it throws. A request whose on_token throws ends; the others continue as if it had returned false, and
  // the first exception is rethrown when the step is complete. on_token must not call the scheduler.
  bool step(const OnToken& on_token, const std::atomic<bool>* cancel = nullptr);
  // Ends a waiting or running request. Unknown ids are ignored.
  void cancel(RequestId id);

  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  // Tokens that the engine has processed so far: prompt tokens, and sampled tokens that were fed back one by one.
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t decode_tokens() const { return decode_tokens_; }
  // Prompt tokens that requests with `keep` found in the cache so far.
  int64_t reused_tokens() const { return reused_tokens_; }

 private:
  struct Sequence {
    RequestId id = 0;
    Request request;
    std::vector<int32_t> tokens;  // prompt and sampled tokens
    int64_t cached = 0;           // how many of them are in the cache
    int64_t drawn = 0;
    std::vector<int32_t> blocks;  // its rows or blocks in the cache

    int64_t pending() const { return static_cast<int64_t>(tokens.size()) - cached; }
    // The next step only feeds back the last sampled token.
    bool decodes() const { return drawn > 0 && pending() == 1; }
  };

  int64_t blocks_for(int64_t tokens) const;
  void admit();
  void start(Sequence& sequence, int64_t num_blocks);
  void drop_kept();
  void compose();
  void finish(size_t index);

  InferEngine& engine_;
  BlockAllocator allocator_;
  std::deque<Sequence> waiting_;
  std::vector<Sequence> running_;
  std::vector<int32_t> kept_;     // the blocks of the kept sequence; the engine knows which tokens they hold
  InferEngine::Input input_;      // reused
  std::vector<size_t> in_step_;   // sequences of this step, indices into running_
  std::vector<RequestId> ended_;  // requests that ended in this step; reused
  RequestId next_id_ = 1;
  int64_t prompt_tokens_ = 0;
  int64_t decode_tokens_ = 0;
  int64_t reused_tokens_ = 0;
};

}  // namespace eadem::engine
