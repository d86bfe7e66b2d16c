// SPDX-License-Identifier: Apache-2.0
//
// EngineOptions::pack_after_first_step: the first step reads the file, the next ones read packed weights, with the bits
// of an engine that packed them when it loaded; and what is wrong with a file is said when it is loaded, as ever.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "tests/models/tiny_gguf.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace first_step_test {

namespace fs = std::filesystem;

class FirstSteps : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_first_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    model_ = folder_ / "m.gguf";
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::unique_ptr<engine::InferEngine> open(bool pack_after_first_step, const std::string& pack_cache = {}) const {
    engine::EngineOptions options;
    options.pack_after_first_step = pack_after_first_step;
    options.pack_cache = pack_cache;
    options.max_logit_rows = 8;
    return engine::InferEngine::from_checkpoint(open_checkpoint(model_.string()),
                                                open_device("cpu", {.num_threads = 2}), options);
  }

  // Logits of the last rows of a step.
  static std::vector<float> step(engine::InferEngine& engine, int32_t cached, int32_t tokens) {
    engine::InferEngine::Input input;
    for (int32_t i = 0; i < tokens; ++i) input.input_ids.push_back((3 + 2 * i + cached) % 48);
    input.input_lengths = {tokens};
    input.cache_lengths = {cached};
    input.all_logits = tokens <= 8;
    engine.forward(input);
    const Tensor logits = engine.logits();
    const float* values = logits.view.as<float>();
    return {values, values + logits.view.num_elements()};
  }

  // `first`: tokens of the first step; `stored`: whether it reads the file; `waits`: whether packing does.
  void expect_same_bits(int32_t first, bool stored, bool waits = true) const {
    const auto usual = open(false), late = open(true);
    EXPECT_FALSE(usual->parameters().has_stored());
    EXPECT_EQ(late->parameters().has_stored(), waits);
    EXPECT_EQ(step(*late, 0, first), step(*usual, 0, first));
    EXPECT_EQ(late->parameters().has_stored(), stored);
    EXPECT_EQ(step(*late, first, 1), step(*usual, first, 1));
    EXPECT_FALSE(late->parameters().has_stored());
    EXPECT_EQ(step(*late, first + 1, 3), step(*usual, first + 1, 3));
  }

  fs::path folder_, model_;
};

TEST_F(FirstSteps, EveryTypeGivesTheSameBits) {
  std::vector<WeightType> types = {DType::f32, DType::bf16, DType::f16};
  for (const BlockEncoding* encoding : BlockEncoding::writable()) types.emplace_back(DType::f32, encoding);
  for (const WeightType& type : types) {
    SCOPED_TRACE(type.name());
    test::write_model(model_, type);
    const BlockEncoding* blocks = BlockEncoding::of(type.encoding);
    const bool waits = blocks == nullptr || blocks->format().code_bits == 8;
    for (const int32_t first : {1, 5, 40}) expect_same_bits(first, waits, waits);
  }
}

TEST_F(FirstSteps, ALongOnePacksFirst) {
  test::write_model(model_, {DType::f32, BlockEncoding::find("q8_0")}, 1, 512);
  expect_same_bits(256, true);
  expect_same_bits(257, false);
}

TEST_F(FirstSteps, GiveTheValuesAndTakeOthers) {
  test::write_model(model_, DType::bf16);
  const auto usual = open(false), late = open(true);
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const Tensor a = usual->parameters().to_host(name), b = late->parameters().to_host(name);
  ASSERT_EQ(a.dtype(), b.dtype());
  EXPECT_EQ(std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())), 0);
  const Tensor other = Tensor::on_host(DType::f32, a.shape());
  std::fill_n(other.view.as<float>(), other.view.num_elements(), 0.01f);
  for (engine::InferEngine* engine : {usual.get(), late.get()}) engine->load_param(name, other.view);
  EXPECT_TRUE(late->parameters().has_stored());  // the others
  EXPECT_EQ(step(*late, 0, 5), step(*usual, 0, 5));
}

TEST_F(FirstSteps, APackCacheGoesBefore) {
  test::write_model(model_, {DType::f32, BlockEncoding::find("q8_0")});
  const auto engine = open(true, (folder_ / "cache").string());
  EXPECT_FALSE(engine->parameters().has_stored());
}

TEST_F(FirstSteps, ABadFileIsRefusedWhenItIsLoaded) {
  test::write_model(model_, DType::bf16);
  const auto size = fs::file_size(model_);
  {
    std::fstream file(model_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(size / 2 & ~uintmax_t{1}));
    file.write("\x80\x7f", 2);  // infinity
  }
  const std::string usual = test::refusal([&] { open(false); }), late = test::refusal([&] { open(true); });
  EXPECT_NE(usual.find("not finite"), std::string::npos) << usual;
  EXPECT_EQ(late, usual);
  fs::resize_file(model_, size - 64);
  const std::string cut = test::refusal([&] { open(false); });
  EXPECT_NE(cut, "");
  EXPECT_EQ(test::refusal([&] { open(true); }), cut);
}

}  // namespace first_step_test
}  // namespace eadem::models
