// SPDX-License-Identifier: Apache-2.0
//
// Engines of several ranks, which are processes, and requests that they run. Ranks are forked: a test that includes
// this is a program of its own.
#pragma once

#include <functional>
#include <map>

#include "eadem/distributed/forked_ranks.h"
#include "eadem/engine/llm.h"
#include "tests/engine/engine_helpers.h"

namespace eadem::engine {

inline const std::string kStories = EADEM_SOURCE_DIR "/assets/stories";

inline std::shared_ptr<Device> one_thread() { return open_device("cpu", {.num_threads = 1}); }

// Products are not rounded: then only the order of sums differs from one rank's.
inline EngineOptions accurate() {
  EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.cache = PagedKVCacheConfig{.max_batch_size = 4, .max_cache_len = 64};
  return options;
}

using Make = std::function<std::unique_ptr<InferEngine>(const std::shared_ptr<Device>&, const EngineOptions&)>;

inline Make from(const std::string& model) {
  return [=](const std::shared_ptr<Device>& device, const EngineOptions& options) {
    return InferEngine::from_checkpoint(models::open_checkpoint(model), device, options);
  };
}

inline std::unique_ptr<distributed::ForkedRanks> fork_ranks(int size, const Make& make,
                                                            distributed::ProcessGroupOptions limits = {}) {
  const auto body = [&](const std::shared_ptr<Communicator>& ranks) {
    const auto device = one_thread();
    follow_engines(ranks, device, [&](const CacheConfig& cache, int64_t draft_tokens) {
      EngineOptions options = accurate();
      options.cache = cache;
      options.draft_tokens = draft_tokens;
      options.ranks = ranks;
      return make(device, options);
    });
  };
  return std::make_unique<distributed::ForkedRanks>(size, body, limits);
}

inline EngineOptions on(const distributed::ForkedRanks& ranks) {
  EngineOptions options = accurate();
  options.ranks = ranks.communicator();
  return options;
}

inline SamplingParams params(int64_t max_tokens, double temperature = 0) {
  SamplingParams result;
  result.temperature = temperature;
  result.seed = 7;
  result.max_tokens = max_tokens;
  result.ignore_eos = true;
  return result;
}

struct Drawn {
  std::vector<std::vector<int32_t>> tokens;  // of each request
  std::vector<float> logprobs;               // of all, as they were drawn
  bool operator==(const Drawn&) const = default;
};

// Runs more greedy requests than fit in a step, some of which begin alike, with prompts longer than a step.
inline Drawn draw(InferEngine& engine) {
  Drawn drawn;
  StepLoop loop(engine);
  std::map<StepLoop::RequestId, size_t> places;
  const int64_t vocab = engine.model().info().vocab;
  for (const auto& [length, seed] : {std::pair{5, 1}, {21, 2}, {1, 3}, {21, 2}, {18, 5}, {7, 1}}) {
    places[loop.add({.prompt = tokens_of(length, vocab, seed), .sampling = {}, .biases = {}, .max_tokens = 12})] =
        drawn.tokens.size();
    drawn.tokens.emplace_back();
  }
  while (loop.step([&](const StepEvent& event) {
    drawn.tokens[places.at(event.id)].push_back(event.token);
    drawn.logprobs.push_back(event.logprob);
    return true;
  })) {
  }
  return drawn;
}

}  // namespace eadem::engine
