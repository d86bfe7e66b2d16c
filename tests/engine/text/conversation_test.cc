// SPDX-License-Identifier: Apache-2.0
//
// A conversation that stays in the cache gets the answers of an engine that has never seen it, and computes only what
// is new.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>

#include "eadem/engine/llm.h"
#include "tests/engine/engine_helpers.h"

namespace eadem::engine {
namespace conversation_test {

using Ids = std::vector<int32_t>;

constexpr int64_t kStep = 16, kBlock = 4;

std::unique_ptr<InferEngine> engine_of(bool paged) {
  EngineSetup setup;
  setup.options.max_num_batched_tokens = kStep;
  if (paged) {  // room for one sequence of the context
    const models::Checkpoint checkpoint = models::open_checkpoint(setup.model);
    const int64_t tokens = checkpoint.model->info().max_positions;
    setup.options.cache = PagedKVCacheConfig{
        .max_kv_memory_bytes = tokens * kv_bytes_per_token(checkpoint, *open_device("cpu"), setup.options),
        .block_size = kBlock,
        .max_batch_size = 2};
  }
  return make_engine(setup);
}

struct Answer {
  Ids ids;
  std::vector<float> logprobs;
  friend bool operator==(const Answer&, const Answer&) = default;
};

StepLoop::Request request_of(Ids prompt, int64_t max_tokens, float temperature = 0, bool keep = true) {
  return {.prompt = std::move(prompt),
          .sampling = {.temperature = temperature, .seed = 5, .repetition_penalty = temperature > 0 ? 1.2f : 1.0f},
          .max_tokens = max_tokens,
          .keep = keep};
}

// Runs one request to its end.
Answer answer(StepLoop& scheduler, const StepLoop::Request& request) {
  Answer result;
  scheduler.add(request);
  while (scheduler.step([&](const StepLoop::Drawn& drawn) {
    result.ids.push_back(drawn.token);
    result.logprobs.push_back(drawn.logprob);
    return true;
  })) {
  }
  return result;
}

Answer fresh_answer(InferEngine& engine, StepLoop::Request request) {
  engine.reset_cache();
  StepLoop scheduler(engine);
  request.keep = false;
  return answer(scheduler, request);
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

int64_t common_prefix(const Ids& a, const Ids& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

// A scheduler with a conversation, beside an engine that forgets everything before each answer.
class Pair {
 public:
  explicit Pair(bool paged) : engine(engine_of(paged)), scheduler(*engine), other_(engine_of(paged)) {}

  // Answers on both and compares. Returns the conversation with the answer.
  Ids turn(const Ids& prompt, int64_t max_tokens, float temperature = 0) {
    const StepLoop::Request request = request_of(prompt, max_tokens, temperature);
    const int64_t computed = scheduler.prompt_tokens(), reused = scheduler.reused_tokens();
    const int64_t known = std::min(common_prefix(cached_, prompt), std::ssize(prompt) - 1);
    const Answer ours = answer(scheduler, request);
    const int64_t found = scheduler.reused_tokens() - reused;
    // A paged cache may still hold blocks of earlier turns, too.
    if (engine->reuses_prefixes()) {
      EXPECT_GE(found, known);
    } else {
      EXPECT_EQ(found, known);
    }
    EXPECT_EQ(scheduler.prompt_tokens() - computed, std::ssize(prompt) - found);
    EXPECT_EQ(ours, fresh_answer(*other_, request)) << prompt.size() << " tokens, " << known << " known";
    cached_ = joined(prompt, ours.ids);
    Ids conversation = cached_;
    cached_.pop_back();  // nothing follows the last token, so it was never computed
    return conversation;
  }
  // Forgets what the test believes to be cached.
  void forget(int64_t kept = 0) { cached_.resize(static_cast<size_t>(kept)); }
  Ids tokens(int64_t count, int32_t seed) const { return tokens_of(count, engine->model().info().vocab, seed); }

  std::unique_ptr<InferEngine> engine;
  StepLoop scheduler;

 private:
  std::unique_ptr<InferEngine> other_;
  Ids cached_;
};

class Conversation : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Caches, Conversation, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Paged" : "Static"; });

TEST_P(Conversation, TurnsComputeWhatIsNew) {
  Pair pair(GetParam());
  // New messages of lengths around the borders of steps and blocks.
  Ids conversation;
  int32_t seed = 0;
  for (int64_t length : {int64_t{5}, int64_t{1}, kBlock - 1, kBlock, kBlock + 1, kStep - 1, kStep, kStep + 1}) {
    ++seed;
    conversation = pair.turn(joined(conversation, pair.tokens(length, seed)), 1 + seed % 4, seed % 2 == 0 ? 0.f : 0.9f);
  }
}

TEST_P(Conversation, EditsComputeWhatFollowsThem) {
  Pair pair(GetParam());
  const Ids first = pair.turn(pair.tokens(11, 1), 6);
  const Ids second = pair.turn(joined(first, pair.tokens(7, 2)), 9);
  pair.turn(joined(first, pair.tokens(7, 2)), 3);        // the same question again: one token is computed
  pair.turn(joined(first, pair.tokens(7, 2)), 9, 0.9f);  // and again, drawn
  pair.turn(joined(first, pair.tokens(2, 3)), 5);        // the question was another one
  pair.turn(first, 4);                                   // shorter than what is cached
  for (int64_t cut = 1; cut < std::ssize(second); cut += 3) pair.turn({second.begin(), second.begin() + cut}, 2);
  pair.turn(pair.tokens(30, 9), 4);  // nothing in common
}

TEST_P(Conversation, FillsTheContext) {
  Pair pair(GetParam());
  const int64_t limit = pair.engine->max_sequence_length();
  const Ids almost = pair.turn(pair.tokens(limit - 4, 1), 2);
  const Ids full = pair.turn(almost, 100);
  EXPECT_EQ(std::ssize(full), limit + 1);  // the last token needs no place
  pair.turn({full.begin(), full.begin() + limit}, 5);
}

TEST_P(Conversation, OthersTakeTheRoom) {
  Pair pair(GetParam());
  const Ids first = pair.turn(pair.tokens(20, 1), 5);
  // A request of the whole cache.
  const int64_t limit = pair.engine->max_sequence_length();
  std::vector<StepLoop::Request> others = {request_of(pair.tokens(limit, 4), 1, 0, false)};
  for (int i = 0; i < 4; ++i) others.push_back(request_of(pair.tokens(limit / 2, 5 + i), 3, 0, false));
  for (const StepLoop::Request& other : others) pair.scheduler.add(other);
  while (pair.scheduler.step([](const StepLoop::Drawn&) { return true; })) {
  }
  const int64_t reused = pair.scheduler.reused_tokens();
  const StepLoop::Request request = request_of(joined(first, pair.tokens(3, 2)), 4);
  const Answer ours = answer(pair.scheduler, request);
  EXPECT_EQ(pair.scheduler.reused_tokens(), reused);
  EXPECT_EQ(ours, fresh_answer(*pair.engine, request));
}

TEST(OneConversation, RoomThatWasReservedInVainIsForOthers) {
  Pair pair(true);
  const int64_t limit = pair.engine->max_sequence_length();
  const Ids prompt = pair.tokens(20, 1);
  pair.scheduler.add(request_of(prompt, limit));  // may take the whole cache, but ends with the first token
  while (pair.scheduler.step([](const StepLoop::Drawn&) { return false; })) {
  }
  answer(pair.scheduler, request_of(pair.tokens(limit / 2, 2), 1, 0, false));
  answer(pair.scheduler, request_of(joined(prompt, pair.tokens(3, 3)), 1));
  EXPECT_EQ(pair.scheduler.reused_tokens(), std::ssize(prompt));
}

TEST_P(Conversation, TwoAtOnceAreBothRight) {
  Pair pair(GetParam());
  const Ids first = pair.turn(pair.tokens(20, 1), 5);
  std::map<StepLoop::RequestId, Answer> answers;
  std::map<StepLoop::RequestId, StepLoop::Request> requests;
  for (int i = 0; i < 3; ++i) {
    const StepLoop::Request request = request_of(joined(first, pair.tokens(3 + i, 2)), 6);
    requests[pair.scheduler.add(request)] = request;
  }
  while (pair.scheduler.step([&](const StepLoop::Drawn& drawn) {
    answers[drawn.id].ids.push_back(drawn.token);
    answers[drawn.id].logprobs.push_back(drawn.logprob);
    return true;
  })) {
  }
  for (const auto& [id, request] : requests) EXPECT_EQ(answers[id], fresh_answer(*pair.engine, request));
}

TEST_P(Conversation, ACancelledTurnLeavesWhatItComputed) {
  for (const int steps : {0, 1, 2, 5}) {  // the prompt takes three
    Pair pair(GetParam());
    const Ids first = pair.turn(pair.tokens(9, 1), 4);
    const Ids prompt = joined(first, pair.tokens(2 * kStep + 1, 2));
    const StepLoop::RequestId id = pair.scheduler.add(request_of(prompt, 50));
    Ids drawn;
    const StepLoop::OnToken on_token = [&](const StepLoop::Drawn& d) {
      drawn.push_back(d.token);
      return true;
    };
    for (int i = 0; i < steps; ++i) pair.scheduler.step(on_token);
    const std::atomic<bool> cancel = true;
    EXPECT_THROW(pair.scheduler.step(on_token, &cancel), Cancelled);
    pair.scheduler.cancel(id);
    EXPECT_EQ(pair.scheduler.num_running(), 0);
    const int64_t before = pair.scheduler.reused_tokens();
    const StepLoop::Request again = request_of(joined(prompt, drawn), 4);
    EXPECT_EQ(answer(pair.scheduler, again), fresh_answer(*engine_of(GetParam()), again));
    const int64_t computed = steps < 3 ? std::ssize(first) - 1 + steps * kStep : std::ssize(prompt) + steps - 3;
    EXPECT_EQ(pair.scheduler.reused_tokens() - before, computed) << steps << " steps";
  }
}

TEST_P(Conversation, AnEmptiedCacheIsNoticed) {
  Pair pair(GetParam());
  const Ids first = pair.turn(pair.tokens(20, 1), 5);
  pair.engine->reset_cache();
  pair.forget();
  pair.turn(joined(first, pair.tokens(3, 2)), 4);
}

TEST(Llm, AConversationStaysInTheCache) {
  LLM llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 1}), {});
  SamplingParams params;
  params.max_tokens = 12;
  params.seed = 3;
  params.stop = {"zebra"};
  Ids conversation = llm.tokenizer().encode("Once upon a time");
  std::optional<FinishReason> before;
  for (const char* more : {" The dog", " Then", ""}) {
    const Ids next = llm.tokenizer().encode(more, {.add_special_tokens = false});
    const Ids prompt = joined(conversation, next);
    std::string streamed;
    const Completion turn =
        llm.continue_ids(prompt, params, [&](size_t, std::string_view piece) { streamed += piece; });
    const GenerationStats stats = llm.last_stats();
    EXPECT_EQ(stats.prompt_tokens + stats.reused_tokens, std::ssize(prompt));
    EXPECT_EQ(turn.prompt_tokens, std::ssize(prompt));
    if (before) {  // the last token of an answer that was cut has not been computed
      const int64_t last = *before == FinishReason::length ? 1 : 0;
      EXPECT_EQ(stats.prompt_tokens, std::max<int64_t>(1, std::ssize(next) + last));
    }
    before = turn.finish_reason;
    EXPECT_EQ(streamed, turn.text);
    LLM other(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 1}), {});
    const Completion alone = other.generate_ids({prompt}, params)[0];
    EXPECT_EQ(alone.text, turn.text);
    EXPECT_EQ(alone.token_ids, turn.token_ids);
    EXPECT_EQ(alone.logprobs, turn.logprobs);
    EXPECT_EQ(other.last_stats().reused_tokens, 0);
    conversation = joined(prompt, turn.token_ids);
  }
}

}  // namespace conversation_test
}  // namespace eadem::engine
