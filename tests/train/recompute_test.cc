// SPDX-License-Identifier: Apache-2.0
//
// Training that computes the values of layers again in the backward pass has the bits of training that keeps them, and
// takes less memory.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "eadem/models/auto_model.h"
#include "eadem/train/trainer.h"
#include "tests/train/golden_batches.h"

namespace eadem::train {
namespace {

struct Case {
  const char* name;
  const char* model;
  const char* products = "plain";
  DType weights = DType::f32;
  const char* head_products = "plain";
};

class Recompute : public testing::TestWithParam<Case> {
 protected:
  static std::unique_ptr<Trainer> trainer(bool recompute_layers) {
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam().model).string());
    auto trainer =
        std::make_unique<Trainer>(checkpoint.model, open_device("cpu"),
                                  TrainerOptions{.weights = GetParam().weights,
                                                 .products = products_from_name(GetParam().products),
                                                 .head_products = head_products_from_name(GetParam().head_products),
                                                 .batch_tokens = 128,
                                                 .recompute_layers = recompute_layers});
    trainer->load(checkpoint);
    return trainer;
  }

  static Batch batch(int64_t vocab, uint32_t seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<uint32_t> token(0, static_cast<uint32_t>(vocab - 1));
    Batch batch;
    clear(batch);
    for (const int64_t length : {60, 17, 33}) {
      std::vector<uint32_t> document(static_cast<size_t>(length) + 1);
      for (uint32_t& id : document) id = token(random);
      append_piece(batch, document, 0, length);
    }
    return batch;
  }
};

TEST_P(Recompute, HasTheBitsOfKeptValuesAndTakesLessMemory) {
  const auto kept = trainer(false), again = trainer(true);
  EXPECT_LT(again->training_program().memory_plan().arena_bytes, kept->training_program().memory_plan().arena_bytes);
  EXPECT_GT(again->training_program().graph().nodes().size(), kept->training_program().graph().nodes().size());
  for (uint32_t step = 0; step < 2; ++step) {
    const Batch passes[] = {batch(kept->model().info().vocab, 2 * step),
                            batch(kept->model().info().vocab, 2 * step + 1)};
    EXPECT_EQ(kept->step(passes, 1e-3).loss, again->step(passes, 1e-3).loss) << step;
  }
  const auto expected = kept->state_dict(), actual = again->state_dict();
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const TensorView &a = expected[i].second.view, &b = actual[i].second.view;
    ASSERT_EQ(a.size_bytes(), b.size_bytes());
    EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.size_bytes())), 0) << expected[i].first;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, Recompute,
    testing::Values(Case{"llama", "llama"}, Case{"llama_bf16", "llama", "plain", DType::bf16},
                    Case{"llama_block128", "llama", "fp8_block128"}, Case{"llama_tensor", "llama", "fp8_tensor"},
                    Case{"llama_delayed", "llama", "fp8_tensor_delayed", DType::bf16, "fp8_tensor_delayed"},
                    Case{"gemma4", "gemma4"}, Case{"qwen3_moe", "qwen3_moe"}, Case{"deepseek_v2", "deepseek_v2"},
                    Case{"qwen3_next", "qwen3_next"}, Case{"granitemoehybrid", "granitemoehybrid"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace eadem::train
