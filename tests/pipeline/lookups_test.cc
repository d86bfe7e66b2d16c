// SPDX-License-Identifier: Apache-2.0
//
// A compiled program looks nothing up: no scan for an encoding, no dispatch on an instruction set or a dtype, no search
// for an algorithm. (tests/ops/kernel_runner.h says the same of every kernel.)
#include "eadem/core/lookups.h"

#include <gtest/gtest.h>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/infer_engine.h"

namespace eadem::engine {
namespace {

TEST(Lookups, AreCounted) {
  const int64_t before = num_lookups();
  BlockEncoding::of(nullptr);
  EXPECT_EQ(num_lookups() - before, 1);
}

class LookupsOfSteps : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, LookupsOfSteps, testing::Values("/assets/stories", "/tests/data/golden/qwen3"));

TEST_P(LookupsOfSteps, ThereAreNone) {
  const models::Checkpoint checkpoint = models::open_checkpoint(std::string(EADEM_SOURCE_DIR) + GetParam());
  EngineOptions options;
  options.cache = StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 64};
  const int64_t before = num_lookups();
  const auto engine = InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 2}), options);
  EXPECT_GT(num_lookups(), before) << "compilation looks up";

  InferEngine::Input prompt;
  prompt.input_ids.assign(3 * 20, 5);
  prompt.input_lengths.assign(3, 20);
  prompt.cache_lengths.assign(3, 0);
  prompt.sampling.resize(3);
  prompt.sampling[1].temperature = 0.8f;
  prompt.sampling[2].repetition_penalty = 1.2f;
  InferEngine::Input decode = prompt;
  decode.input_ids.assign(3, 6);
  decode.input_lengths.assign(3, 1);
  decode.cache_lengths.assign(3, 20);

  const int64_t compiled = num_lookups();
  engine->forward(prompt);
  engine->forward(decode);
  EXPECT_EQ(num_lookups() - compiled, 0);
}

}  // namespace
}  // namespace eadem::engine
