// SPDX-License-Identifier: Apache-2.0
//
// What a step states of its tokens' places: position_ids are what the model takes for their positions, as transformers
// does, and slot_mapping is where they are stored.
#include <gtest/gtest.h>

#include <filesystem>

#include "eadem/io/safetensors.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/f32_error.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace places_test {

using test::refusal;

EngineSetup exact(const std::string& model, CacheConfig cache = StaticKVCacheConfig{}) {
  EngineSetup setup{.model = golden(model)};
  setup.options.mode = HardwareMode::accuracy;  // f32 throughout, as the reference
  setup.options.cache = cache;
  return setup;
}

std::vector<int32_t> integers(const Tensor& tensor) {
  return {tensor.view.as<int32_t>(), tensor.view.as<int32_t>() + tensor.view.num_elements()};
}

class Positions : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transformers, Positions, testing::Values("llama", "yarn", "gpt2"));

TEST_P(Positions, AreThoseThatAreStated) {
  const auto expected = io::open_weights(golden(GetParam()) + "/positions.safetensors");
  const std::vector<int32_t> prompt = integers(expected->get("prompt")),
                             positions = integers(expected->get("positions"));
  const auto length = static_cast<int32_t>(prompt.size());
  const auto engine = make_engine(exact(GetParam()));
  const InferEngine::Input whole{.input_ids = prompt,
                                 .input_lengths = {length},
                                 .cache_lengths = {0},
                                 .position_ids = positions,
                                 .all_logits = true};
  engine->forward(whole);
  const std::vector<float> ours = values(engine->logits());
  const Tensor exactly = expected->get("logits_f64"), other = expected->get("logits");
  const auto of = [](const auto& list) { return [&list](size_t i) { return list[i]; }; };
  const std::vector<float> exact_values = values(exactly), other_values = values(other);
  ASSERT_EQ(ours.size(), exact_values.size());
  test::expect_f32_error(test::deviation(ours.size(), of(ours), of(exact_values)),
                         test::deviation(ours.size(), of(other_values), of(exact_values)), GetParam());

  // The same bits in two steps, where the second finds the first one's keys in the cache.
  engine->reset_cache();
  std::vector<float> in_steps;
  for (const auto& [begin, end] : {std::pair{0, 6}, {6, length}}) {
    const auto part = [&, begin = begin, end = end](const auto& list) {
      return std::vector<int32_t>(list.begin() + begin, list.begin() + end);
    };
    engine->forward({.input_ids = part(prompt),
                     .input_lengths = {end - begin},
                     .cache_lengths = {begin},
                     .position_ids = part(positions),
                     .all_logits = true});
    for (const float value : values(engine->logits())) in_steps.push_back(value);
  }
  expect_same_bits(in_steps, ours, "two steps");

  // Those that a step without any has.
  InferEngine::Input usual = whole;
  usual.position_ids.clear();
  engine->reset_cache();
  engine->forward(usual);
  const std::vector<float> without = values(engine->logits());
  for (int32_t i = 0; i < length; ++i) usual.position_ids.push_back(i);
  engine->reset_cache();
  engine->forward(usual);
  expect_same_bits(values(engine->logits()), without, "the usual positions");

  InferEngine::Input beyond = whole;
  beyond.position_ids[3] = static_cast<int32_t>(engine->model().info().max_positions);
  EXPECT_HAS(refusal([&] { engine->forward(beyond); }),
             fmt::format("InvalidArgument: token 3 of sequence 0 has position {}; the model's context is {} tokens",
                         engine->model().info().max_positions, engine->model().info().max_positions));
  beyond.position_ids[3] = -1;
  EXPECT_HAS(refusal([&] { engine->forward(beyond); }), "has position -1");
}

// Two sequences, of 6 and 3 tokens in blocks of 4, then one token more of each.
TEST(Slots, SayWhereTokensAreStored) {
  const PagedKVCacheConfig cache{.max_kv_memory_bytes = 1 << 18, .block_size = 4, .max_batch_size = 2};
  const auto engine = make_engine(exact("llama", cache));
  const InferEngine::Input prompts{.input_ids = {1, 2, 3, 4, 5, 6, 7, 8, 9},
                                   .input_lengths = {6, 3},
                                   .cache_lengths = {0, 0},
                                   .block_tables = {{9, 3}, {5}}};
  const InferEngine::Input more{
      .input_ids = {10, 11}, .input_lengths = {1, 1}, .cache_lengths = {6, 3}, .block_tables = {{9, 3}, {5}}};
  engine->forward(prompts);
  const std::vector<float> expected = values(engine->logits());
  engine->forward(more);
  const std::vector<float> expected_more = values(engine->logits());

  // Slots alone, where no tokens are cached; and slots behind the blocks of the cached tokens.
  InferEngine::Input by_slots = prompts;
  by_slots.block_tables.clear();
  by_slots.slot_mapping = {36, 37, 38, 39, 12, 13, 20, 21, 22};
  engine->reset_cache();
  engine->forward(by_slots);
  expect_same_bits(values(engine->logits()), expected, "by slots");
  engine->forward(more);  // finds them where the slots said
  expect_same_bits(values(engine->logits()), expected_more, "after slots");
  InferEngine::Input third{.input_ids = {1, 2},
                           .input_lengths = {2},
                           .cache_lengths = {7},
                           .block_tables = {{9, 3}},
                           .slot_mapping = {15, 28}};
  engine->forward(third);
  EXPECT_EQ(
      refusal([&] {
        engine->forward({.input_ids = {3}, .input_lengths = {1}, .cache_lengths = {9}, .block_tables = {{9, 3, 7}}});
      }),
      "");

  const auto refused = [&](std::vector<int64_t> slots, std::vector<std::vector<int32_t>> tables = {}) {
    InferEngine::Input wrong = by_slots;
    wrong.slot_mapping = std::move(slots);
    wrong.block_tables = std::move(tables);
    return refusal([&] { engine->forward(wrong); });
  };
  EXPECT_HAS(refused({36, 37, 38, 39, 12, 14, 20, 21, 22}), "slot 14 of token 5 of sequence 0 is place 2 of its block");
  EXPECT_HAS(refused({36, 37, 38, 35, 12, 13, 20, 21, 22}), "slot 35 of token 3 of sequence 0 lies in block 8");
  EXPECT_HAS(refused({36, 37, 38, 39, 12, 13, 20, 21, 22}, {{9, 4}, {5}}), "its block table says block 4");
  EXPECT_HAS(refused({-1, 37, 38, 39, 12, 13, 20, 21, 22}), "slot -1 of token 0 of sequence 0; expected 0 to");
  EXPECT_HAS(refused({36, 37}), "slot_mapping has 2 entries; expected 9");
  InferEngine::Input lacks = third;
  lacks.block_tables = {{9}};  // the other block of its cached tokens is that of the first slot
  EXPECT_EQ(refusal([&] { engine->forward(lacks); }), "");
  lacks.block_tables.clear();
  EXPECT_HAS(refusal([&] { engine->forward(lacks); }),
             "slot 15 of token 0 of sequence 0 lies in its block 1; block_tables name 0");
}

TEST(Slots, OfAStaticCacheNameItsRows) {
  const auto engine = make_engine(exact("llama", StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 8}));
  const InferEngine::Input rows{
      .input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}, .block_tables = {{2}}};
  engine->forward(rows);
  const std::vector<float> expected = values(engine->logits());
  engine->reset_cache();
  engine->forward({.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}, .slot_mapping = {16, 17, 18}});
  expect_same_bits(values(engine->logits()), expected, "row 2");
  EXPECT_EQ(refusal([&] {
              engine->forward({.input_ids = {4}, .input_lengths = {1}, .cache_lengths = {3}, .slot_mapping = {19}});
            }),
            "");
  EXPECT_HAS(refusal([&] {
               engine->forward({.input_ids = {4}, .input_lengths = {1}, .cache_lengths = {4}, .slot_mapping = {4}});
             }),
             "sequence 0 has 4 cached tokens; block 0 holds 0 of the 4");
}

}  // namespace places_test
}  // namespace eadem::engine
