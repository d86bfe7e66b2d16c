// SPDX-License-Identifier: Apache-2.0
#include "parallel_model.h"

#include <gtest/gtest.h>

#include <cstring>

#include "eadem/engine/infer_engine.h"
#include "eadem/train/trainer.h"

namespace example {
namespace {

using namespace eadem;

// The engine serves it, and cutting a prompt in two does not change a bit.
TEST(ParallelModel, IsServed) {
  const auto model = std::make_shared<ParallelModel>(ParallelConfig{});
  engine::InferEngine engine(model, open_device("cpu", {.num_threads = 2}), {}, model->spec());
  engine.load_random(1, 0.2);
  engine.forward({.input_ids = {5, 6, 7, 8}, .input_lengths = {4}, .cache_lengths = {0}});
  const Tensor whole = engine.logits();
  engine.reset_cache();
  engine.forward({.input_ids = {5, 6, 7}, .input_lengths = {3}, .cache_lengths = {0}});
  engine.forward({.input_ids = {8}, .input_lengths = {1}, .cache_lengths = {3}});
  const Tensor parts = engine.logits();
  EXPECT_EQ(std::memcmp(whole.view.data, parts.view.data, static_cast<size_t>(whole.view.size_bytes())), 0);
}

// The trainer trains it: the same graph, no line more.
TEST(ParallelModel, IsTrained) {
  train::Trainer trainer(std::make_shared<ParallelModel>(ParallelConfig{}), open_device("cpu", {.num_threads = 2}),
                         {.batch_tokens = 32, .weight_decay = 0});
  trainer.load_random(1, 0.2);
  const std::vector<uint32_t> document = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  train::Batch batch;
  train::clear(batch);
  train::append_piece(batch, document, 0, 12);
  const double first = trainer.step(std::span(&batch, 1), 1e-2).loss;
  double last = first;
  for (int step = 0; step < 30; ++step) last = trainer.step(std::span(&batch, 1), 1e-2).loss;
  EXPECT_LT(last, first / 4) << "it learns the one document there is";
}

}  // namespace
}  // namespace example
