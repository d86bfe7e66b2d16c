// SPDX-License-Identifier: Apache-2.0
//
// What a step reads: each part of the descriptor, one upload a step, and addresses that stay.
#include <gtest/gtest.h>

#include "eadem/engine/step_descriptor.h"
#include "tests/engine/engine_helpers.h"

namespace eadem::engine {
namespace step_descriptor_test {

using Ids = std::vector<int32_t>;

constexpr int64_t kBlock = 4;

std::unique_ptr<InferEngine> paged_engine() {
  EngineSetup setup;
  setup.options.max_num_batched_tokens = 32;
  setup.options.cache = PagedKVCacheConfig{.block_size = kBlock, .max_batch_size = 3, .max_cache_len = 40};
  return make_engine(setup);
}

// Returns the first `count` entries of an input as the program reads it.
template <typename T>
std::vector<T> entries(const pipeline::Program& program, const char* name, int64_t first, int64_t count) {
  const T* data = static_cast<const T*>(program.view(program.input(name)).data) + first;
  return {data, data + count};
}

TEST(StepDescriptor, LaysOutWhatAStepReads) {
  const auto engine = paged_engine();
  StepLayout layout(engine->prefill_program());
  StepDescriptor descriptor(engine->device(), layout.size_bytes(), engine->cache_spec(), engine->limits().vocab);
  CacheContents contents(30, kBlock);
  const Ids prompt = {5, 6, 7, 5, 9, 6}, blocks = {11, 3}, other_blocks = {7, 0, 0}, last_block = {9},
            other = {8, 8, 2};
  contents.write(blocks, 0, std::span(prompt).first(5));
  SamplingInput sampling{.temperature = 0.5f, .seed = 3, .frequency_penalty = 0.5f, .prompt_length = 3};
  const std::vector<StepSequence> plan = {
      {.tokens = std::span(prompt).subspan(5), .cached = 5, .blocks = blocks, .sampling = sampling},
      {.tokens = std::span(other).first(2), .cached = 0, .blocks = other_blocks, .samples = false},
      {.tokens = std::span(other).last(1), .cached = 0, .blocks = last_block},
  };
  descriptor.fill(layout, plan, false, contents);
  descriptor.upload();
  const auto read = [&]<typename T>(StepLayout::Part part, int64_t first, int64_t count, T) {
    const auto* data =
        reinterpret_cast<const T*>(static_cast<std::byte*>(descriptor.device_data()) + layout.offset(part)) + first;
    return std::vector<T>(data, data + count);
  };
  EXPECT_EQ(read(StepLayout::token_ids, 0, 4, int32_t{}), (Ids{6, 8, 8, 2}));
  EXPECT_EQ(read(StepLayout::positions, 0, 4, int32_t{}), (Ids{5, 0, 1, 0}));
  EXPECT_EQ(read(StepLayout::slots, 0, 4, int64_t{}), (std::vector<int64_t>{3 * kBlock + 1, 28, 29, 36}));
  EXPECT_EQ(read(StepLayout::query_start, 0, 4, int32_t{}), (Ids{0, 1, 3, 4}));
  EXPECT_EQ(read(StepLayout::kv_length, 0, 3, int32_t{}), (Ids{6, 2, 1}));
  EXPECT_EQ(read(StepLayout::logit_rows, 0, 2, int32_t{}), (Ids{0, 3}));
  const int64_t stride = layout.bounds()[Symbol::max_blocks];
  EXPECT_EQ(stride, 10);  // 40 tokens, whatever the step has
  EXPECT_EQ(read(StepLayout::block_table, 0, 2, int32_t{}), blocks);
  EXPECT_EQ(read(StepLayout::block_table, stride, 1, int32_t{}), (Ids{7}));
  EXPECT_EQ(read(StepLayout::block_table, 2 * stride, 1, int32_t{}), last_block);
  const auto rows = read(StepLayout::sample_rows, 0, 2, kernels::SampleRow{});
  EXPECT_EQ(rows[0].settings.seed, 3);
  EXPECT_EQ(rows[0].position, 6);
  EXPECT_EQ(rows[0].penalties_begin, 0);
  EXPECT_EQ(rows[0].penalties_end, 4);                                                     // 5, 6, 7 and 9
  EXPECT_EQ(read(StepLayout::penalties, 0, 8, int32_t{}), (Ids{5, 1, 6, 1, 7, 0, 9, 1}));  // generated: 5, 9 and 6
  EXPECT_EQ(rows[1].position, 1);
  EXPECT_EQ(rows[1].penalties_begin, rows[1].penalties_end);
  EXPECT_EQ(descriptor.symbols()[Symbol::tokens], 4);
  EXPECT_EQ(descriptor.symbols()[Symbol::sequences], 3);
  EXPECT_EQ(descriptor.symbols()[Symbol::logit_rows], 2);
  EXPECT_EQ(descriptor.symbols()[Symbol::max_blocks], stride);
}

// A decode step differs from the one before in the contents of the buffer alone, so that it can be replayed.
TEST(StepDescriptor, OneUploadAStepToAddressesThatStay) {
  const auto engine = paged_engine();
  StepLoop loop(*engine);
  for (int i = 0; i < 2; ++i) loop.add({.prompt = tokens_of(3 + i, engine->limits().vocab, i), .max_tokens = 30});
  std::vector<std::vector<const void*>> addresses;
  std::vector<Shape> shapes;
  const int64_t before = engine->num_uploads();
  int64_t steps = 0;
  const auto step = [&] {
    ++steps;
    return loop.step([](const StepEvent&) { return true; });
  };
  step();
  const pipeline::Program& program = engine->decode_program();
  while (step()) {
    std::vector<const void*>& each = addresses.emplace_back();
    for (const char* name : {"token_ids", "positions", "slots", "query_start", "kv_length", "logit_rows", "sample_rows",
                             "block_table", "penalties"})
      each.push_back(program.view(program.input(name)).data);
    shapes.push_back(program.view(program.input("block_table")).shape);
    EXPECT_EQ(each, addresses[0]);
    EXPECT_EQ(shapes.back(), shapes[0]);
  }
  EXPECT_GT(addresses.size(), 20u);
  EXPECT_EQ(engine->num_uploads() - before, steps);
  EXPECT_EQ(entries<int32_t>(program, "kv_length", 0, 1)[0], 3 + 29);
}

}  // namespace step_descriptor_test
}  // namespace eadem::engine
