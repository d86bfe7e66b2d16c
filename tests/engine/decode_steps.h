// SPDX-License-Identifier: Apache-2.0
//
// Greedy decoding of several sequences by the steps of an engine, whose tokens come from the host or from the device.
#pragma once

#include <deque>

#include "tests/engine/engine_helpers.h"

namespace eadem::engine {

struct Decoded {
  std::vector<std::vector<int32_t>> tokens;  // [step][sequence]
  std::vector<float> logprobs;               // of all tokens
  std::vector<float> logits;                 // of the last step
};

// Runs the prompts in one step and then `steps` steps of one token each. `ahead` steps are submitted before the first
// is collected, each with the tokens of the step before; 0: every step gets its tokens from the host. The engine has a
// paged cache; its sequences use blocks 0, 1, … in turn.
inline Decoded decode_greedily(InferEngine& engine, const std::vector<std::vector<int32_t>>& prompts, int steps,
                               int ahead) {
  engine.reset_cache();
  const int64_t block_size = engine.cache_spec().block_size;
  const auto count = prompts.size();
  std::vector<std::vector<int32_t>> tables(count);
  int32_t next_block = 0;
  for (size_t s = 0; s < count; ++s)
    for (int64_t t = 0; t < std::ssize(prompts[s]) + steps; t += block_size) tables[s].push_back(next_block++);
  // Each sequence has a ring of blocks in every cache group with a window.
  std::vector<std::vector<std::vector<int32_t>>> windows(count);
  for (size_t s = 0; s < count; ++s)
    for (const modules::WindowGroup& group : engine.cache_spec().windows) {
      const auto length = static_cast<int32_t>(group.num_blocks / engine.max_batch_size());
      std::vector<int32_t>& table = windows[s].emplace_back();
      for (int32_t i = 0; i < std::ssize(tables[s]); ++i)
        table.push_back(static_cast<int32_t>(s) * length + i % length);
    }
  std::vector<int64_t> cached(count, 0);
  std::vector<int32_t> last(count, 0);
  const auto plan_of = [&](bool prompt, bool from_device) {
    std::vector<StepSequence> plan;
    for (size_t s = 0; s < count; ++s) {
      plan.push_back({.tokens = prompt ? std::span(prompts[s]) : std::span(last).subspan(s, 1),
                      .cached = cached[s],
                      .blocks = tables[s],
                      .windows = windows[s],
                      .row = from_device ? static_cast<int32_t>(s) : -1});
      cached[s] += std::ssize(plan.back().tokens);
    }
    return plan;
  };
  Decoded result;
  const auto collect = [&] {
    const InferEngine::Output& output = engine.collect();
    result.tokens.push_back(output.output_ids);
    result.logprobs.insert(result.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
    last = output.output_ids;
  };
  engine.submit(plan_of(true, false));
  for (int step = 0; step < steps; ++step) {
    while (engine.num_waiting() > ahead) collect();
    engine.submit(plan_of(false, ahead > 0));
  }
  result.logits = values(engine.logits());
  while (engine.num_waiting() > 0) collect();
  return result;
}

inline void expect_same(const Decoded& a, const Decoded& b, const std::string& what) {
  EXPECT_EQ(a.tokens, b.tokens) << what;
  expect_same_bits(a.logprobs, b.logprobs, what);
  expect_same_bits(a.logits, b.logits, what);
}

}  // namespace eadem::engine
