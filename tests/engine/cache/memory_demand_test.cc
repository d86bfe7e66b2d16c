// SPDX-License-Identifier: Apache-2.0
//
// An engine that does not fit is refused before it allocates anything, with what it needs and what would fit.
#include <gtest/gtest.h>

#include "eadem/engine/cache/memory_demand.h"
#include "eadem/models/decoders/decoder.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace memory_demand_test {

using test::refusal;

// A model whose tokens take 1000 bytes each.
std::string refused(const CacheConfig& config, int64_t free_bytes, int num_ranks = 1, int64_t in_file = 0) {
  const CachePlanRequest request{.config = config,
                                 .bytes = {.per_token = 800, .windows = {{64, 200}}},
                                 .context = 4096,
                                 .block_size = 16,
                                 .max_num_batched_tokens = 512};
  MemoryDemand demand;
  demand.weights = 2'000'000;
  demand.weights_in_file = in_file;
  demand.states = {{"all tokens", 3'200'000}, {"window of 64", 800'000}};
  demand.activations = 1'000'000;
  return refusal([&] { require_memory(demand, request, plan_cache(request), free_bytes, num_ranks); });
}

TEST(MemoryDemand, IsRefusedWithAPlanAndWhatWouldFit) {
  const StaticKVCacheConfig fixed{.max_batch_size = 4, .max_cache_len = 1000};
  EXPECT_EQ(refused(fixed, 7'000'000), "");
  EXPECT_EQ(refused(fixed, 6'999'999),
            "OutOfMemory: the model needs weights 2.00 MB + KV cache 4.00 MB (all tokens 3.20 MB, window of 64 800 kB) "
            "+ activations 1.00 MB = 7.00 MB of memory; 7.00 MB are free; max_cache_len 999 with max_batch_size 4 "
            "would fit");
  EXPECT_HAS(refused(fixed, 3'002'000), "; max_cache_len 1 with max_batch_size 2 would fit");
  EXPECT_HAS(refused(fixed, 3'000'999), "; no KV cache fits beside the rest: a token takes 1.00 kB");
  EXPECT_HAS(refused(fixed, 2'000'000), "; no KV cache fits beside the rest");
  // What fits is not refused.
  EXPECT_EQ(refused(fixed, 5'000'000, 1, 2'000'000), "");
  EXPECT_HAS(refused(fixed, 4'999'000, 1, 2'000'000), "weights 2.00 MB, of which 2.00 MB stay in the file, + KV cache");
  EXPECT_HAS(refused(fixed, 4'000'000, 2), "= 7.00 MB of memory on each of 2 ranks; 4.00 MB are free for each; max_");
  const PagedKVCacheConfig paged{.max_kv_memory_bytes = 4'000'000, .max_batch_size = 4};
  EXPECT_HAS(refused(paged, 5'000'000), "; max_kv_memory_bytes of 2000000 would fit");
  EXPECT_HAS(refused(paged, 3'000'100), "; no KV cache fits beside the rest: its smallest takes ");
}

TEST(MemoryDemand, IsThatOfTheEngine) {
  models::Checkpoint checkpoint = models::open_checkpoint(golden("gemma3"));  // windows
  models::ModelConfig config = *checkpoint.model->config();
  config.max_position_embeddings = int64_t{1} << 24;
  checkpoint.model = std::make_shared<models::Decoder>(config);
  const StaticKVCacheConfig small{.max_cache_len = 64}, huge{.max_batch_size = 256};
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto bytes_before = device->memory().free_bytes;
  EngineOptions options;
  options.max_num_batched_tokens = 64;
  const auto make = [&](const CacheConfig& cache) {
    options.cache = cache;
    return InferEngine::from_checkpoint(checkpoint, device, options);
  };
  const std::string answer = refusal([&] { make(huge); });
  EXPECT_HAS(answer, "OutOfMemory: the model needs weights ");
  EXPECT_HAS(answer, "KV cache");
  EXPECT_HAS(answer, "(all tokens ");
  EXPECT_HAS(answer, ", window of 8 ");
  EXPECT_HAS(answer, "+ activations ");
  EXPECT_HAS(answer, " would fit");
  EXPECT_LT(bytes_before - device->memory().free_bytes, int64_t{4} << 30) << "nothing was allocated";
  // A cache of an engine that is there.
  const auto engine = make(small);
  EXPECT_HAS(refusal([&] { engine->reset_cache(huge); }), "OutOfMemory: the model needs KV cache");
  engine->reset_cache(small);
  engine->forward({.input_ids = {1}, .input_lengths = {1}, .cache_lengths = {0}});
}

// Snapshots of states per sequence count, by a name of their own.
TEST(MemoryDemand, NamesSnapshots) {
  const models::Checkpoint config =
      models::open_config(EADEM_SOURCE_DIR "/benchmarks/models/qwen3.5-0.8b-12-layers.json");
  EngineOptions options;
  options.cache = PagedKVCacheConfig{.max_batch_size = 1, .max_cache_len = 64, .state_snapshots = int64_t{1} << 24};
  const std::string answer = refusal(
      [&] { InferEngine(config.model, open_device("cpu", {.num_threads = 1}), options, models::spec_of(config)); });
  // A state has 9 layers of 16 heads, each of 128 x 128 values, 3 tokens of 2 x 128 and 16 more, and the last 3 rows of
  // 3 x 16 x 128 channels.
  EXPECT_HAS(answer, ", per sequence 10.6 MB, snapshots per sequence 177 TB)");
}

}  // namespace memory_demand_test
}  // namespace eadem::engine
