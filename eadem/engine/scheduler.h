// SPDX-License-Identifier: Apache-2.0
//
// Scheduler: decides what each step of an engine computes. It knows requests and the cache's blocks, and neither a
// model nor a device: plan() depends on nothing but the calls before it and the contents of the cache, and commit()
// takes what the step sampled.
//
// A step mixes the next token of every running sequence with chunks of prompts, up to the engine's step size. A request
// starts when the cache has room for the tokens that it has, and takes further blocks as it decodes. Where none is
// free, the request that comes last in order gives up its blocks and waits; its tokens are computed again. A request's
// tokens depend neither on the others nor on that.
//
// Order: the greater priority first, of equals who came first. Who has seen ageing_steps steps goes before all who have
// not, and a request preempts those behind it to start if its priority is greater or it has aged. So no request waits
// forever: the first in order is never preempted and computes a token in every step, and an aged request is behind
// earlier ones alone. It ends after at most
//
//   ageing_steps + the sum of T over the requests that came no later and are there still,   T = prompt + max_tokens
//
// committed steps (where states per sequence begin again after steps that were given up, these do not count).
//
// Prefixes: with prefix_caching a request begins with the blocks that hold its first tokens, whichever requests
// computed them and whether these run or have ended. The last token of a prompt is always computed. A request does not
// start while one before it computes the block that it would compute next, so that equal prompts are computed once.
//
// States per sequence stand at one position, so that such a request begins where a snapshot of them is, too. A step of
// a sequence whose tokens so far fill their blocks begins with saving one; a prompt is cut at the borders that are
// worth one (scheduler_snapshots.cc).
//
// One sequence may stay in the cache after its request has ended, for a conversation: the next request with `keep` only
// computes what follows the tokens that both begin with, if the windows of the cache still hold what that reads.
// Another request that needs the room takes it.
//
// Speculation: propose() says which tokens may follow those of a decoding request, from whatever source. A step of
// decoding sequences alone computes proposed tokens beside theirs, as far as it has room that nobody else needs.
// commit() takes the tokens that were sampled behind accepted ones: as long as what was sampled is what was proposed.
// What is sampled depends on the tokens before it, the seed and the position alone, so that a request has the same
// tokens whatever is proposed. The others are forgotten: no block is named for them, none is kept. States per sequence
// have seen them, and go back to where the step began (StepSequence::may_return): the request's next step computes the
// tokens that were taken once more, before the one that is new.
//
// A step may be planned before the results of the one before it are known (plan_ahead), so that an asynchronous
// device has it in time. Whoever ends with those results was computed once more in vain.
//
// One thread at a time may use a scheduler, except for check(), which any thread may call.
#pragma once

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
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
  int64_t num_snapshots = 0;                       // of these; without any, prefix_caching is not for such models
  int64_t snapshot_distance = 64;                  // a prompt is cut for one behind so many further tokens
  int64_t vocab = 1;
  int64_t model_context = 1;                                           // tokens; for messages
  int64_t max_penalized_tokens = std::numeric_limits<int64_t>::max();  // that the penalties of a step look at
  int64_t max_logit_rows = std::numeric_limits<int64_t>::max();        // of a step; at least max_batch_size
  int64_t max_draft_tokens = 0;                                        // proposed tokens of a step
  int64_t ageing_steps = 512;                                          // see above
  bool prefix_caching = false;  // not with windows, which lead to no earlier position
  std::string cache_salt;       // what else the contents of blocks depend on
};

// The outcome of a step for one request, as far as one token: a step that took proposed tokens has an event for each
// token that it sampled, in order.
struct StepEvent {
  RequestId id = 0;
  RequestState state = RequestState::waiting;  // after the step
  int64_t computed = 0;                        // tokens of the request that the step added to the cache
  int64_t proposed = 0;                        // in the first event of a step: proposed tokens that it computed
  int64_t accepted = 0;                        // in each further one: 1, as the token before it was proposed
  int64_t recomputed = 0;                      // in the first one: tokens that a step had computed before
  int64_t reused = 0;                          // in the request's first step: tokens that the cache held already
  bool decoded = false;                        // the step fed back a sampled token; otherwise it read from the prompt
  bool sampled = false;                        // token and logprob are set
  int32_t token = 0;                           // -1: the logits were not finite, and the state is failed
  float logprob = 0;
  // An event of its own before the others of its request, where log-probabilities of the prompt are wanted: token is
  // that of the prompt, and logprob its log-probability.
  bool scored = false;
  // The likeliest tokens at this place and their log-probabilities, kMostTopLogprobs of each; empty: not asked for.
  // They lie where commit() was given them.
  std::span<const int32_t> top_tokens = {};
  std::span<const float> top_logprobs = {};
};

// The tokens and log-probabilities of a step, one for each row of logits; views of InferEngine::Output.
struct StepResults {
  std::span<const int32_t> tokens;
  std::span<const float> logprobs;
  std::span<const int32_t> top_tokens = {};
  std::span<const float> top_logprobs = {};

  StepResults rows(size_t begin, size_t count) const;
};

// A request whose next token needs a mask, and what may be drawn without it.
struct Maskable {
  RequestId id = 0;
  std::span<const int32_t> tokens;  // of prompt and answer
  const GenerationRequest* request = nullptr;
};

// Blocks of prompts that requests looked for when they started, and what the memory cost.
struct CacheCounters {
  int64_t hits = 0;         // were there
  int64_t misses = 0;       // had to be computed
  int64_t evictions = 0;    // were given to other tokens
  int64_t preemptions = 0;  // of requests
};

// A request for which the next step may compute proposed tokens.
struct Draftable {
  RequestId id = 0;
  std::span<const int32_t> tokens;  // of prompt and answer
  const GenerationRequest* request = nullptr;
  int64_t most = 0;     // proposed tokens, at most
  int64_t left = 0;     // tokens that the answer may still have
  int64_t pending = 1;  // tokens that its next step computes in any case: more than one after wrong ones
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

  // The decoding requests, if the next step is likely to be one of decoding sequences alone; otherwise none. The result
  // is valid until the next call of add, end, plan or commit.
  std::span<const Draftable> draftable();
  // Proposes tokens behind those that a decoding request has now, in place of what was proposed before. Unknown ids are
  // ignored.
  void propose(RequestId id, std::span<const int32_t> tokens);

  // The requests with a token_mask whose next token has no mask yet, and how each gets its one, [ceil(vocab / 32)]
  // words, which plan() needs. The result is valid until the next call of add, end, plan or commit.
  std::span<const Maskable> maskable();
  void allow(RequestId id, std::span<const int32_t> words);

  // Starts waiting requests that fit and returns the sequences of the next step; none: no request is there. `cache`
  // tells which tokens of a kept sequence the engine still holds. The result is valid until the next call of add, end,
  // plan or commit. A plan that is not committed takes no token from a request: the next one is the same, or,
  // with states per sequence, which a step overwrites, computes its sequences from their first token or a snapshot.
  // Only who was preempted may start again.
  std::span<const StepSequence> plan(const CacheContents& cache);
  // Plans the step behind the planned one, while that one runs: its sequences go on, each with the token that it
  // samples there (StepSequence::row). Returns none where that need not be the next step, since somebody ends or starts
  // with it, or where more than the token's value on the device is needed: masks, penalties, bad words, processors,
  // proposed tokens, states per sequence. The result is valid as that of plan() is.
  std::span<const StepSequence> plan_ahead();
  // After commit(): the step of plan_ahead() becomes the planned one, without the requests that have ended since, whose
  // rows of logits are there and count for nothing. Returns false where there is none. Before, no other step may be
  // planned, unless forget_ahead() says that it was given up.
  bool follow_ahead();
  void forget_ahead() { ahead_.clear(); }
  bool has_ahead() const { return !ahead_.plan.empty(); }
  // The planned step.
  std::span<const StepSequence> planned_step() const { return now_.plan; }
  // The requests of the plan, in its order; 0: one that has ended (follow_ahead).
  std::span<const RequestId> planned() const { return now_.ids; }
  // Takes the tokens and log-probabilities that the planned step sampled, one for each row of logits
  // (StepSequence::num_rows). Returns the events of the sequences of the plan, in its order; a request whose event says
  // finished or failed is forgotten. The result is valid until the next commit.
  std::span<const StepEvent> commit(const StepResults& results);
  std::span<const StepEvent> commit(std::span<const int32_t> tokens, std::span<const float> logprobs) {
    return commit(StepResults{.tokens = tokens, .logprobs = logprobs});
  }

  const SchedulerLimits& limits() const { return limits_; }
  bool is_idle() const { return sequences_.empty(); }
  // Returns the state of a request that has not ended, and nothing for any other id.
  std::optional<RequestState> state(RequestId id) const;
  // How many requests wait, prefill or decode now, and how many have ended in each way so far.
  int64_t count(RequestState state) const { return counts_[static_cast<size_t>(state)]; }
  int64_t num_free_blocks() const { return cache_.num_free(); }
  const CacheManager& cache() const { return cache_; }
  // Tokens of committed steps: of prompts, and sampled ones that were fed back one by one.
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t decode_tokens() const { return decode_tokens_; }
  // Proposed tokens of committed steps, and those of them that were sampled.
  int64_t proposed_tokens() const { return proposed_tokens_; }
  int64_t accepted_tokens() const { return accepted_tokens_; }
  // Prompt tokens that requests found in the cache when they first started.
  int64_t reused_tokens() const { return reused_tokens_; }
  CacheCounters counters() const;

 private:
  struct Sequence {
    RequestId id = 0;
    RequestState state = RequestState::waiting;
    GenerationRequest request;
    int64_t arrival = 0;           // steps that were committed before
    std::vector<int32_t> tokens;   // prompt and sampled tokens
    int64_t cached = 0;            // how many of them are in the cache
    int64_t reused = 0;            // how many were there at the start; 0 once that was reported
    int64_t returns_to = 0;        // tokens that its states may go back to, besides where they stand
    bool has_started = false;      // once at least
    SequenceBlocks blocks;         // its rows or blocks in the cache
    std::vector<BlockHash> names;  // of its first full blocks, as far as they were asked for
    BlockHash root = {};           // before the first of them
    int64_t num_named = 0;         // blocks that have been offered their names
    int32_t loads = kNoBlock;      // the snapshot that its next step begins with, with a reference
    std::vector<int64_t> borders;  // places where its prompt is cut for a snapshot, in order
    int64_t chunk_end = 0;         // the first end of a chunk from here on has a wanted snapshot; -1: one has
    int64_t answer_blocks = 0;     // behind which its answer has left its last snapshot; 0: it has left none
    std::vector<int32_t> drafts;   // proposed behind `tokens`
    std::vector<int32_t> fed;      // the new tokens of a step with proposed ones
    int64_t scored = 0;            // places of the prompt whose next token has its log-probability
    std::vector<int32_t> allowed;  // the mask of the next token; empty: every token
    int64_t masked_tokens = -1;    // the number of tokens that `allowed` follows; -1: none yet

    int64_t pending() const { return std::ssize(tokens) - cached; }
    // Places of the prompt that are still to be scored begin at `scored` and end here.
    int64_t scored_end() const { return request.prompt_logprobs ? std::ssize(request.prompt) - 1 : 0; }
    bool wants_scores() const { return scored < scored_end(); }
    int64_t num_sampled() const { return std::ssize(tokens) - std::ssize(request.prompt); }
  };
  // A step that is planned and not committed, in the order of its sequences.
  struct Planned {
    std::vector<StepSequence> plan;
    std::vector<RequestId> ids;     // 0: has ended since
    std::vector<Sequence*> places;  // null: has ended since

    void reserve(size_t most);
    void clear();
  };
  // Where a sequence may start: behind so many tokens of the kept sequence, or behind shared blocks.
  struct Start {
    int64_t kept_tokens = 0;
    int64_t shared_blocks = 0;
    int32_t snapshot = kNoBlock;  // behind the shared blocks
    int64_t blocks_there = 0;     // of the sequence's first ones
  };
  struct ByPriority {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };
  struct ByArrival {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->id < b->id; }
  };

  int64_t tokens_for(const GenerationRequest& request) const;
  void move_to(Sequence& sequence, RequestState state);
  void forget(Sequence& sequence);
  void release(Sequence& sequence);
  void release_kept();

  bool has_aged(const Sequence& sequence) const;
  bool precedes(const Sequence& a, const Sequence& b) const;
  bool may_preempt(const Sequence& sequence, const Sequence& victim) const;
  Sequence& next_waiting();
  void wait(Sequence& sequence);
  Start find_start(Sequence& sequence, const CacheContents& cache);
  bool has_room(const Sequence& sequence, const Start& start) const;
  bool try_start(Sequence& sequence, const CacheContents& cache);
  bool can_share_later(Sequence& sequence);
  void start(Sequence& sequence, const Start& start);
  void preempt(Sequence& sequence);
  void put_back(Sequence& sequence);
  void make_way(const CacheContents& cache);
  bool could_start(const Sequence& sequence) const;
  bool grow(Sequence& sequence);
  std::span<const BlockHash> names_of(Sequence& sequence, int64_t num_blocks);
  void name_blocks(Sequence& sequence);

  bool takes_snapshots() const { return limits_.prefix_caching && limits_.num_snapshots > 0; }
  void choose_borders(Sequence& sequence, const Start& start);
  void note_branches(Sequence& sequence);
  bool waits_for_snapshot(Sequence& sequence);
  int64_t up_to_border(const Sequence& sequence, int64_t count) const;
  int32_t plan_snapshot(Sequence& sequence);
  void commit_snapshots(Sequence& sequence, const StepSequence& planned);
  void forget_snapshots();
  void drop_load(Sequence& sequence);

  bool goes_on();
  void forget_plan(bool committed = false);
  int64_t penalized_tokens(const Sequence& sequence) const;
  int64_t plan_sequence(Sequence& sequence, int64_t budget);
  int64_t most_with_scores(const Sequence& sequence, int64_t count) const;
  void plan_drafts(int64_t budget);
  int64_t room_for_drafts(const Sequence& sequence) const;
  StepEvent commit_sequence(Sequence& sequence, const StepSequence& planned);
  size_t commit_scores(Sequence& sequence, const StepSequence& planned, const StepResults& results);
  void commit_rows(Sequence& sequence, const StepSequence& planned, StepEvent event, const StepResults& results);
  void take_token(Sequence& sequence, StepEvent& event, int32_t token);

  SchedulerLimits limits_;
  CacheManager cache_;
  BlockHasher hasher_;
  std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences_;  // that have not ended
  std::set<Sequence*, ByPriority> waiting_;                             // those that wait, first time or again
  std::set<Sequence*, ByArrival> arrived_;                              // the same
  std::vector<Sequence*> running_;                                      // in order when a plan is made
  SequenceBlocks kept_;          // of the kept sequence; the cache knows which tokens they hold
  int64_t kept_tokens_ = 0;      // how many they are
  int64_t kept_returns_to_ = 0;  // Sequence::returns_to
  Planned now_, ahead_;          // the planned step and the one behind it; reused, like the next three
  std::vector<StepEvent> events_;
  std::vector<Draftable> draftable_;
  std::vector<Maskable> maskable_;
  int64_t num_masked_ = 0;  // requests with a token_mask
  RequestId next_id_ = 1;
  int64_t steps_ = 0;                // committed
  int64_t epoch_ = 0;                // of the cache's contents
  const Sequence* first_ = nullptr;  // of those that ran when the plan began
  int64_t penalized_left_ = 0;
  int64_t scored_left_ = 0;  // rows of logits that scores may have beside one of each sequence
  CacheCounters counters_;
  std::array<int64_t, kNumRequestStates> counts_{};
  int64_t prompt_tokens_ = 0;
  int64_t decode_tokens_ = 0;
  int64_t reused_tokens_ = 0;
  int64_t proposed_tokens_ = 0;
  int64_t accepted_tokens_ = 0;
};

}  // namespace eadem::engine
