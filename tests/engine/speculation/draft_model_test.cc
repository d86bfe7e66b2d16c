// SPDX-License-Identifier: Apache-2.0
//
// A draft model proposes what its own engine would sample for the request, whatever it proposed before and for whom.
#include "eadem/engine/speculation/draft_model.h"

#include "eadem/engine/llm.h"
#include "tests/engine/speculation/speculating_loop.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace draft_model_test {

using Ids = std::vector<int32_t>;
using test::refusal;

constexpr int64_t kContext = 64;

std::unique_ptr<InferEngine> engine_of(int64_t batch, const std::string& model, int64_t draft_tokens = 1) {
  EngineOptions options;
  options.draft_tokens = draft_tokens;
  options.cache = StaticKVCacheConfig{.max_batch_size = batch, .max_cache_len = kContext};
  options.max_num_batched_tokens = 8;  // prompts take several steps
  return InferEngine::from_checkpoint(models::open_checkpoint(model), open_device("cpu", {.num_threads = 1}), options);
}

struct Text {
  RequestId id;
  Ids tokens;
  GenerationRequest request;
};

// The sampling of a request knows the length of its prompt, as a scheduler sets it.
Text text(RequestId id, int64_t prompt, int64_t vocab, SamplingInput sampling) {
  sampling.prompt_length = static_cast<int32_t>(prompt);
  const Ids tokens = tokens_of(prompt, vocab, static_cast<int32_t>(id));
  return {id, tokens, {.prompt = tokens, .sampling = sampling, .max_tokens = 1000}};
}

std::vector<Ids> proposed(DraftModel& draft, const std::vector<const Text*>& texts, int64_t depth) {
  std::vector<Proposal> proposals;
  for (const Text* each : texts)
    proposals.push_back({.id = each->id, .tokens = each->tokens, .request = &each->request, .depth = depth});
  draft.propose(proposals);
  std::vector<Ids> result;
  for (Proposal& each : proposals) result.push_back(std::move(each.drafts));
  return result;
}

// What an engine samples behind these tokens.
Ids sampled(InferEngine& engine, const Text& text, int64_t count) {
  GenerationRequest request = text.request;
  Ids result, tokens = text.tokens;
  engine.reset_cache();
  for (int64_t i = 0; i < count; ++i) {
    const Ids row = {0};
    const std::vector<StepSequence> plan = {{.tokens = std::span(tokens).subspan(i == 0 ? 0 : tokens.size() - 1),
                                             .cached = i == 0 ? 0 : std::ssize(tokens) - 1,
                                             .blocks = row,
                                             .sampling = request.sampling,
                                             .biases = request.biases}};
    result.push_back(engine.forward(plan).output_ids[0]);
    tokens.push_back(result.back());
  }
  return result;
}

class DraftModelTest : public testing::TestWithParam<const char*> {
 protected:
  DraftModelTest()
      : model(golden(GetParam())),
        vocab(engine_of(1, model)->model().info().vocab),
        draft(engine_of(2, model), vocab, 0.1) {
    EngineOptions options;
    options.cache = StaticKVCacheConfig{.max_cache_len = kContext};
    alone =
        InferEngine::from_checkpoint(models::open_checkpoint(model), open_device("cpu", {.num_threads = 1}), options);
  }

  std::string model;
  int64_t vocab;
  DraftModel draft;
  std::unique_ptr<InferEngine> alone;
};
// Those behind llama have states per sequence.
INSTANTIATE_TEST_SUITE_P(Models, DraftModelTest, testing::Values("llama", "falcon_h1", "qwen3_next_all", "lfm2"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(DraftModelTest, ProposesWhatItSamples) {
  std::vector<Text> texts = {text(1, 11, vocab, {}),
                             text(2, 20, vocab, {.temperature = 0.8f, .seed = 4, .repetition_penalty = 1.2f})};
  texts[0].request.biases = {{.token = sampled(*alone, texts[0], 1)[0], .bias = kNeverSampled, .end = 3}};
  EXPECT_EQ(draft.backlog(1, texts[0].tokens), 11);
  for (int round = 0; round < 6; ++round) {
    const std::vector<Ids> drafts = proposed(draft, {&texts[0], &texts[1]}, 4);
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(drafts[i], sampled(*alone, texts[i], 4)) << "round " << round << ", text " << i;
      // Some of it is accepted, and then comes another token or none.
      const auto taken = static_cast<std::ptrdiff_t>((round + static_cast<int>(i)) % 5);
      texts[i].tokens.insert(texts[i].tokens.end(), drafts[i].begin(), drafts[i].begin() + taken);
      if (round % 2 == 0) texts[i].tokens.push_back(7);
    }
    // Tokens that are the same again are computed from the first on where states go back to their end alone.
    if (std::string_view(GetParam()) == "llama" || round % 2 == 0) {
      EXPECT_LE(draft.backlog(1, texts[0].tokens), 3);
    }
  }
}

TEST_P(DraftModelTest, MoreRequestsThanRowsTakeTurns) {
  std::vector<Text> texts;
  for (RequestId id = 1; id <= 4; ++id) texts.push_back(text(id, 6 + id, vocab, {}));
  const std::vector<Ids> drafts = proposed(draft, {&texts[0], &texts[1], &texts[2]}, 3);
  EXPECT_EQ(drafts[0], sampled(*alone, texts[0], 3));
  EXPECT_EQ(drafts[1], sampled(*alone, texts[1], 3));
  EXPECT_EQ(drafts[2], Ids()) << "two rows";
  for (const size_t i : {3u, 0u, 2u, 1u, 0u})
    EXPECT_EQ(proposed(draft, {&texts[i]}, 3)[0], sampled(*alone, texts[i], 3)) << i;
  draft.end(1);
  EXPECT_EQ(draft.backlog(1, texts[0].tokens), 7);
  EXPECT_EQ(proposed(draft, {&texts[2], &texts[3]}, 2)[0], sampled(*alone, texts[2], 2));
}

TEST_P(DraftModelTest, ItsContextAndItsVocabularyEndWhatItProposes) {
  const Text full = text(1, kContext, vocab, {}), nearly = text(2, kContext - 2, vocab, {});
  EXPECT_EQ(proposed(draft, {&full}, 4)[0], sampled(*alone, full, 1)) << "the last proposed token needs no place";
  EXPECT_EQ(proposed(draft, {&nearly}, 5)[0].size(), 3u);
  Text beyond = text(3, 5, vocab, {});
  beyond.tokens[2] = static_cast<int32_t>(vocab);  // of a model with a padded vocabulary
  EXPECT_EQ(proposed(draft, {&beyond}, 4)[0], Ids());
  DraftModel of_few(engine_of(1, model), 1, 0.1);
  const Ids of_one_token = proposed(of_few, {&nearly}, 3)[0];
  for (const int32_t token : of_one_token) EXPECT_EQ(token, 0);
}

TEST(DraftModelRefusals, NameWhatTheyRefuse) {
  EngineOptions options;
  options.cache = StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = kContext};
  EXPECT_HAS(refusal([&] { DraftModel(engine_of(1, golden("falcon_h1"), 0), 100, 0.1); }),
             "Unsupported: the draft model: falcon_h1 has states per sequence, which a step overwrites, and of which");
  const std::string stories = EADEM_SOURCE_DIR "/assets/stories", chat = EADEM_SOURCE_DIR "/assets/chat";
  const auto tokenizer = [](const std::string& path) { return open_tokenizer(models::open_checkpoint(path)); };
  EXPECT_EQ(refusal([&] { require_same_tokens(tokenizer(stories), tokenizer(stories)); }), "");
  const std::string differs = refusal([&] { require_same_tokens(tokenizer(stories), tokenizer(chat)); });
  EXPECT_HAS(differs, "Unsupported: the draft model: token ");
  EXPECT_HAS(differs, "they must be the same");
  const auto small = io::Tokenizer::from_file(EADEM_SOURCE_DIR "/tests/data/chat/small");
  EXPECT_HAS(refusal([&] { require_same_tokens(tokenizer(stories), small); }),
             "of the model has 2048; they must be the same");
  EXPECT_HAS(refusal([] { SpeculationOptions::of("model.gguf", 16); }), "draft_tokens is 16; expected 1 to 15");
  EXPECT_HAS(refusal([] { SpeculationOptions::of("lookup", 0); }), "draft_tokens is 0");
  EXPECT_HAS(refusal([] { SpeculationOptions::of(""); }), "speculate is empty");
}

}  // namespace draft_model_test
}  // namespace eadem::engine
