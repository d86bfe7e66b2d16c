// SPDX-License-Identifier: Apache-2.0
//
// Penalties through engine and scheduler: the tokens that a request draws are those of a replay in double precision
// that sees nothing but the sequence, whatever runs beside it and however its prompt is cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "eadem/core/philox.h"
#include "eadem/engine/sampling_params.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

using test::refusal;

// Logits of the token after `tokens`, by an engine that has seen nothing else.
std::vector<float> next_logits(InferEngine& engine, const std::vector<int32_t>& tokens) {
  engine.reset_cache();
  engine.forward({.input_ids = tokens, .input_lengths = {static_cast<int32_t>(tokens.size())}, .cache_lengths = {0}});
  return values(engine.logits());
}

// The definitions: transformers' RepetitionPenaltyLogitsProcessor (over prompt and text), then the OpenAI API's
// penalties (over the text).
std::vector<double> penalized(const std::vector<float>& logits, const std::vector<int32_t>& prompt,
                              const std::vector<int32_t>& text, const SamplingInput& s) {
  std::vector<double> result(logits.begin(), logits.end());
  std::set<int32_t> seen(prompt.begin(), prompt.end());
  seen.insert(text.begin(), text.end());
  for (int32_t token : seen) {
    double& score = result[static_cast<size_t>(token)];
    score = score < 0 ? score * s.repetition_penalty : score / s.repetition_penalty;
  }
  std::map<int32_t, int> counts;
  for (int32_t token : text) ++counts[token];
  for (const auto& [token, count] : counts)
    result[static_cast<size_t>(token)] -= static_cast<double>(s.frequency_penalty) * count + s.presence_penalty;
  return result;
}

// One draw at temperature 1 without filters, or the largest.
int32_t draw(const std::vector<double>& logits, const SamplingInput& s, int64_t position) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  if (s.temperature == 0) return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  double sum = 0, running = 0;
  for (double logit : logits) sum += std::exp((logit - largest) / s.temperature);
  const double u = static_cast<double>(
      uniform_float(philox4x32(static_cast<uint64_t>(s.seed), static_cast<uint64_t>(position)).words[0]));
  for (size_t i = 0; i < logits.size(); ++i) {
    running += std::exp((logits[i] - largest) / s.temperature);
    if (running > u * sum) return static_cast<int32_t>(i);
  }
  return static_cast<int32_t>(logits.size()) - 1;
}

std::vector<StepLoop::Request> penalized_requests(int64_t vocab) {
  const std::vector<SamplingInput> settings = {
      {.repetition_penalty = 1.3f},
      {.repetition_penalty = 0.7f},
      {.presence_penalty = 1.5f},
      {.frequency_penalty = 0.6f},
      {.temperature = 0.9f,
       .seed = 5,
       .repetition_penalty = 1.05f,
       .presence_penalty = 0.5f,
       .frequency_penalty = -0.3f},
      {},
      {.temperature = 1.1f, .seed = 6, .frequency_penalty = 2},
  };
  std::vector<StepLoop::Request> requests;
  for (size_t i = 0; i < settings.size(); ++i)
    requests.push_back({.prompt = tokens_of(5 + 7 * static_cast<int64_t>(i), vocab, static_cast<int32_t>(i)),
                        .sampling = settings[i],
                        .max_tokens = 24});
  return requests;
}

TEST(Penalties, TokensAreThoseOfTheReplay) {
  const auto engine = make_engine();
  const std::vector<StepLoop::Request> requests = penalized_requests(engine->model().info().vocab);
  std::set<std::vector<int32_t>> distinct;
  for (const StepLoop::Request& request : requests) {
    const std::vector<int32_t> drawn = schedule(*engine, {request})[0];
    ASSERT_EQ(drawn.size(), 24u);
    std::vector<int32_t> text, all = request.prompt;
    for (int32_t token : drawn) {
      const std::vector<double> logits = penalized(next_logits(*engine, all), request.prompt, text, request.sampling);
      ASSERT_EQ(token, draw(logits, request.sampling, std::ssize(all))) << "after " << text.size() << " tokens";
      text.push_back(token);
      all.push_back(token);
    }
    SamplingInput plain = request.sampling;
    plain.repetition_penalty = 1;
    plain.presence_penalty = plain.frequency_penalty = 0;
    const StepLoop::Request without{.prompt = request.prompt, .sampling = plain, .max_tokens = 24};
    if (request.sampling.has_penalties()) {
      EXPECT_NE(schedule(*engine, {without})[0], drawn) << "the penalty did nothing";
    }
  }
}

TEST(Penalties, BatchMatesChunksAndCachesDoNotChangeThem) {
  const auto alone_engine = make_engine();
  const std::vector<StepLoop::Request> requests = penalized_requests(alone_engine->model().info().vocab);
  std::vector<std::vector<int32_t>> alone;
  for (const StepLoop::Request& request : requests) alone.push_back(schedule(*alone_engine, {request})[0]);
  for (const bool paged : {false, true})
    for (const int64_t step : {5, 64}) {
      EngineSetup setup;
      setup.options.max_num_batched_tokens = step;
      if (paged)
        setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 4};
      else
        setup.options.cache = StaticKVCacheConfig{.max_batch_size = 4};
      EXPECT_EQ(schedule(*make_engine(setup), requests), alone) << paged << " " << step;
    }
}

TEST(Penalties, LogitsStayAsTheyAre) {
  const auto engine = make_engine();
  const std::vector<int32_t> tokens = tokens_of(9, engine->model().info().vocab, 1);
  const std::vector<float> expected = next_logits(*engine, tokens);
  engine->reset_cache();
  engine->forward({.input_ids = tokens,
                   .input_lengths = {9},
                   .cache_lengths = {0},
                   .sampling = {{.repetition_penalty = 3, .frequency_penalty = 1}}});
  expect_same_bits(values(engine->logits()), expected, "logits");
}

TEST(SamplingParams, GenerationConfigGivesTheDefaults) {
  std::string warnings;
  const Logger log(LogLevel::warning,
                   [&](LogLevel, std::string_view message) { warnings += message, warnings += "\n"; });
  const auto of = [&](const char* json) {
    warnings.clear();
    return SamplingParams::from_generation_config(io::parse_generation_config(json, "g.json"), "g.json", log);
  };
  // Qwen2.5-Instruct's.
  const SamplingParams qwen = of(R"({"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true,
    "eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
    "transformers_version": "4.37.0"})");
  EXPECT_EQ(qwen.repetition_penalty, 1.05);
  EXPECT_EQ(qwen.temperature, 0.7);
  EXPECT_EQ(qwen.top_p, 0.8);
  EXPECT_EQ(qwen.top_k, 20);
  EXPECT_EQ(qwen.max_tokens, SamplingParams().max_tokens);
  EXPECT_EQ(warnings, "");
  EXPECT_EQ(qwen.settings(7).repetition_penalty, 1.05f);
  EXPECT_EQ(qwen.settings(7).seed, 7);
  EXPECT_HAS(to_string(qwen), "repetition_penalty 1.05");

  EXPECT_EQ(of(R"({"do_sample": false, "temperature": 0.6, "max_new_tokens": 9})").temperature, 0);
  EXPECT_EQ(of(R"({"max_new_tokens": 9})").max_tokens, 9);

  // Settings that nothing honours give a warning with the reason, and no error.
  of(R"({"max_length": 4096, "min_length": 3, "min_new_tokens": 2, "typical_p": 0.9, "num_beams": 4})");
  EXPECT_HAS(warnings, "g.json: max_length 4096 is ignored: max_tokens bounds the new tokens");
  EXPECT_HAS(warnings, "g.json: min_length 3 is ignored: ");
  EXPECT_HAS(warnings, "g.json: num_beams 4 is ignored: beam search draws nothing, and do_sample is not false");
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 3);
  // What generation_config.json says of which tokens are drawn.
  const SamplingParams all = of(R"({"typical_p": 0.9, "min_new_tokens": 300, "bad_words_ids": [[5, 6], [7]],
    "suppress_tokens": [8], "stop_strings": ["END"], "num_return_sequences": 2})");
  EXPECT_EQ(warnings, "");
  EXPECT_EQ(all.typical_p, 0.9);
  EXPECT_EQ(all.settings(1).typical_p, 0.9f);
  EXPECT_EQ(all.min_tokens, 300);
  EXPECT_EQ(all.max_tokens, 300);
  EXPECT_EQ(all.bad_words_ids, (std::vector<std::vector<int64_t>>{{5, 6}, {7}, {8}}));
  EXPECT_EQ(all.stop, std::vector<std::string>{"END"});
  EXPECT_EQ(all.n, 2);
  EXPECT_EQ(of(R"({"stop_strings": "END"})").stop, std::vector<std::string>{"END"});
  const SamplingParams beams =
      of(R"({"do_sample": false, "num_beams": 4, "length_penalty": 0.5, "early_stopping": true})");
  EXPECT_EQ(warnings, "");
  EXPECT_EQ(beams.num_beams, 4);
  EXPECT_EQ(beams.length_penalty, 0.5);
  EXPECT_EQ(beams.early_stopping, EarlyStopping::yes);
  EXPECT_EQ(of(R"({"early_stopping": "never"})").early_stopping, EarlyStopping::never);
  EXPECT_EQ(of(R"({"do_sample": false, "num_beams": 4, "repetition_penalty": 1.2})").num_beams, 1);
  EXPECT_HAS(warnings, "num_beams 4 is ignored: beam search does not go with repetition_penalty");
  of(R"({"do_sample": false, "num_beams": 17})");
  EXPECT_HAS(warnings, "num_beams 17 is ignored: there are at most 16 beams");
  of(R"({"min_length": 0, "min_new_tokens": 0, "typical_p": 1.0, "repetition_penalty": 1.0})");
  EXPECT_EQ(warnings, "");
  EXPECT_HAS(refusal([&] { of(R"({"repetition_penalty": 200})"); }),
             "DataCorrupted: g.json: repetition_penalty is 200");
}

TEST(SamplingParams, PenaltiesOutOfRangeAreRefused) {
  const auto refused = [](auto change) {
    SamplingParams params;
    change(params);
    return refusal([&] { params.validate(); });
  };
  EXPECT_HAS(refused([](auto& p) { p.repetition_penalty = 0; }),
             "InvalidArgument: repetition_penalty is 0; expected 0.01 to 100");
  EXPECT_HAS(refused([](auto& p) { p.presence_penalty = -2.5; }), "presence_penalty is -2.5; expected -2 to 2");
  EXPECT_HAS(refused([](auto& p) { p.frequency_penalty = std::numeric_limits<double>::quiet_NaN(); }),
             "frequency_penalty is nan");
  const auto engine = make_engine();
  EXPECT_HAS(
      refusal([&] {
        engine->forward(
            {.input_ids = {1}, .input_lengths = {1}, .cache_lengths = {0}, .sampling = {{.repetition_penalty = -1}}});
      }),
      "sequence 0: repetition_penalty is -1");
}

}  // namespace
}  // namespace eadem::engine
