// SPDX-License-Identifier: Apache-2.0
//
// Helpers that the tests of the engine share: small models, token ids, and logits of a sequence on each path through an
// engine.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/models/config/model_config.h"
#include "tests/engine/step_loop.h"

namespace eadem::engine {

inline std::string golden(const std::string& name) {
  return (std::filesystem::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name).string();
}

// Tokens that depend on position and seed only.
inline std::vector<int32_t> tokens_of(int64_t count, int64_t vocab, int32_t seed) {
  std::vector<int32_t> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<int32_t>((7919 * i + 104729 * seed + 13) % vocab));
  return result;
}

struct EngineSetup {
  std::string model = golden("llama");
  int threads = 2;
  std::string isa;
  EngineOptions options;
};

inline std::unique_ptr<InferEngine> make_engine(const EngineSetup& setup = {}) {
  EngineOptions options = setup.options;
  options.max_logit_rows = std::max<int64_t>(options.max_logit_rows, 128);
  return InferEngine::from_checkpoint(models::open_checkpoint(setup.model),
                                      open_device("cpu", {.num_threads = setup.threads, .isa = setup.isa}), options);
}

inline std::vector<float> values(const Tensor& tensor) {
  return {tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements()};
}

inline void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  ASSERT_FALSE(a.empty()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

// Logits of every token of the sequences, which have one length and begin with an empty cache: after tokens [0,
// ends[0]) of each in the first step, [ends[0], ends[1]) in the second, … In a paged cache their blocks lie in falling
// order: nothing may depend on where they are.
inline std::vector<std::vector<float>> logits_at(InferEngine& engine,
                                                 const std::vector<std::vector<int32_t>>& sequences,
                                                 const std::vector<int64_t>& ends) {
  engine.reset_cache();  // what an earlier run wrote must not stand in for what this one does not write
  std::vector<std::vector<float>> result(sequences.size());
  const modules::CacheSpec& cache = engine.cache_spec();
  const bool paged = cache.layout == modules::CacheLayout::paged;
  const int64_t blocks = (std::ssize(sequences[0]) + cache.block_size - 1) / cache.block_size;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    InferEngine::Input input;
    input.all_logits = true;
    for (size_t s = 0; s < sequences.size(); ++s) {
      input.input_ids.insert(input.input_ids.end(), sequences[s].begin() + begin, sequences[s].begin() + end);
      input.input_lengths.push_back(static_cast<int32_t>(end - begin));
      input.cache_lengths.push_back(static_cast<int32_t>(begin));
      if (!paged) continue;
      std::vector<int32_t>& table = input.block_tables.emplace_back();
      for (int64_t b = 0; b < blocks; ++b)
        table.push_back(static_cast<int32_t>(cache.num_blocks - 1 - static_cast<int64_t>(s) * blocks - b));
    }
    engine.forward(input);
    const Tensor logits = engine.logits();
    const float* row = logits.view.as<float>();
    for (size_t s = 0; s < sequences.size(); ++s) {
      result[s].insert(result[s].end(), row, row + (end - begin) * logits.shape()[1]);
      row += (end - begin) * logits.shape()[1];
    }
    begin = end;
  }
  EXPECT_EQ(begin, std::ssize(sequences[0]));
  return result;
}

// The sequences advance together by `chunk` tokens a step.
inline std::vector<std::vector<float>> logits_of(InferEngine& engine,
                                                 const std::vector<std::vector<int32_t>>& sequences, int64_t chunk) {
  std::vector<int64_t> ends;
  const int64_t length = std::ssize(sequences[0]);
  for (int64_t end = std::min(chunk, length);; end = std::min(end + chunk, length)) {
    ends.push_back(end);
    if (end == length) return logits_at(engine, sequences, ends);
  }
}

// One sequence, alone, in chunks of the given sizes.
inline std::vector<float> logits_in_chunks(InferEngine& engine, const std::vector<int32_t>& tokens,
                                           const std::vector<int>& chunks) {
  std::vector<int64_t> ends;
  for (int chunk : chunks) ends.push_back((ends.empty() ? 0 : ends.back()) + chunk);
  return logits_at(engine, {tokens}, ends)[0];
}

using MakeEngine = std::function<std::unique_ptr<InferEngine>(const CacheConfig& cache, int threads)>;

// Three sequences of `length` tokens have the bits of each alone, in any steps, places and number of threads.
inline void expect_same_bits_everywhere(const MakeEngine& engine_of, int64_t length, const std::string& model) {
  const StaticKVCacheConfig one_place{.max_batch_size = 3, .max_cache_len = length + 4};
  const auto contiguous = engine_of(one_place, 2);
  const int64_t vocab = contiguous->model().info().vocab;
  const std::vector<std::vector<int32_t>> all = {tokens_of(length, vocab, 1), tokens_of(length, vocab, 2),
                                                 tokens_of(length, vocab, 3)};
  std::vector<std::vector<float>> whole;
  for (const std::vector<int32_t>& each : all) whole.push_back(logits_of(*contiguous, {each}, length)[0]);
  for (const float logit : whole[0]) ASSERT_TRUE(std::isfinite(logit)) << model;
  const auto expect = [&](InferEngine& engine, int64_t chunk, const std::string& where) {
    const auto together = logits_of(engine, all, chunk);
    for (size_t i = 0; i < all.size(); ++i)
      expect_same_bits(whole[i], together[i], fmt::format("{} {}: sequence {} of three", model, where, i));
  };
  expect_same_bits(whole[0], logits_of(*contiguous, {all[0]}, 1)[0], fmt::format("{} token by token", model));
  expect(*contiguous, 7, "contiguous");
  expect(*engine_of(one_place, 3), 36, "three threads");
  for (const int64_t block_size : {1, 5, 16})
    expect(
        *engine_of(PagedKVCacheConfig{.block_size = block_size, .max_batch_size = 3, .max_cache_len = length + 4}, 2),
        11, fmt::format("blocks of {}", block_size));
}

// Checks expect_same_bits_everywhere on every instruction set of this processor: with the model of the config.json
// `config`, random weights and a cache of type `kv`.
inline void expect_same_bits_on_every_isa(const std::string& config, const std::string& kv, int64_t length) {
  const auto model = models::model_from_config(io::JsonReader::parse(config, "config"));
  for (const Isa isa : available_isas()) {
    const std::string name(isa_name(isa));
    expect_same_bits_everywhere(
        [&](const CacheConfig& cache, int threads) {
          EngineOptions options;
          options.max_logit_rows = 3 * length;
          options.hardware.kv_cache = kv_cache_type(kv).value();
          options.cache = cache;
          auto engine = std::make_unique<InferEngine>(model, open_device("cpu", {.num_threads = threads, .isa = name}),
                                                      options, model->spec());
          engine->load_random(7, 0.3);
          return engine;
        },
        length, name);
    if (testing::Test::HasFailure()) return;
  }
}

// Returns the tokens that a scheduler gives each request; requests are added in this order.
inline std::vector<std::vector<int32_t>> schedule(InferEngine& engine, const std::vector<StepLoop::Request>& requests) {
  StepLoop scheduler(engine);
  std::vector<std::vector<int32_t>> drawn(requests.size());
  std::vector<StepLoop::RequestId> ids;
  for (const StepLoop::Request& request : requests) ids.push_back(scheduler.add(request));
  while (scheduler.step([&](const StepLoop::Drawn& d) {
    drawn[static_cast<size_t>(std::find(ids.begin(), ids.end(), d.id) - ids.begin())].push_back(d.token);
    return true;
  })) {
  }
  return drawn;
}

}  // namespace eadem::engine
