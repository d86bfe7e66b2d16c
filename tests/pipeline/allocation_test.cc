// SPDX-License-Identifier: Apache-2.0
//
// The steady state is still: after warm-up, a decode step allocates nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "eadem/engine/scheduler.h"

namespace {
std::atomic<int64_t> num_allocations{0};
}  // namespace

// Counts every allocation of the program.
void* operator new(std::size_t size) {
  num_allocations.fetch_add(1);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace eadem::engine {
namespace {

TEST(Allocation, TheCounterCounts) {
  const int64_t before = num_allocations;
  int* number = new int(1);
  asm volatile("" : : "r"(number) : "memory");  // keeps the compiler from removing the pair
  delete number;
  EXPECT_EQ(num_allocations - before, 1);
}

TEST(Allocation, DecodeStepsAllocateNothing) {
  const models::Checkpoint checkpoint = models::open_checkpoint(EADEM_SOURCE_DIR "/tests/data/golden/qwen3");
  EngineOptions options;
  options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 3};
  const auto engine = InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 2}), options);
  Scheduler scheduler(*engine);
  for (int i = 0; i < 3; ++i) {
    Scheduler::Request request;
    request.prompt = {5, 6, 7 + i};
    request.sampling.temperature = i == 0 ? 0.0f : 0.8f;
    request.sampling.top_k = i == 1 ? 10 : 0;
    request.sampling.top_p = 0.9f;
    request.max_tokens = 40;
    scheduler.add(request);
  }
  int64_t drawn = 0;
  const Scheduler::OnToken on_token = [&](const Scheduler::Drawn&) {
    ++drawn;
    return true;
  };
  for (int warm_up = 0; warm_up < 4; ++warm_up) scheduler.step(on_token);
  const int64_t before = num_allocations;
  const int64_t drawn_before = drawn;
  for (int step = 0; step < 20; ++step) scheduler.step(on_token);
  EXPECT_EQ(num_allocations - before, 0);
  EXPECT_EQ(drawn - drawn_before, 60);
}

}  // namespace
}  // namespace eadem::engine
