// SPDX-License-Identifier: Apache-2.0
//
// The device `reference` as the oracle of whole models.
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/engine/llm.h"
#include "eadem/io/safetensors.h"
#include "eadem/train/trainer.h"
#include "tests/engine/engine_helpers.h"
#include "tests/support/f32_error.h"

namespace eadem::engine {
namespace {

const std::string kBundled = (std::filesystem::path(EADEM_SOURCE_DIR) / "assets/stories").string();

// No product rounds its activations, as some instruction sets do for bf16 weights.
std::vector<float> logits_on(const std::string& device, const models::Checkpoint& checkpoint,
                             const std::vector<int32_t>& tokens, const CacheConfig& cache, DType weights) {
  EngineOptions options;
  options.cache = cache;
  options.max_logit_rows = std::ssize(tokens);
  options.hardware.weights = weights;
  options.hardware.matmul_input = MatmulInput::f32;
  const auto engine = InferEngine::from_checkpoint(checkpoint, open_device(device), options);
  return logits_in_chunks(*engine, tokens, {static_cast<int>(tokens.size()) - 3, 1, 2});
}

class GoldenModel : public testing::TestWithParam<const char*> {};

// Only edges of the graph are rounded here, while an f32 program also rounds within ops.
TEST_P(GoldenModel, LiesNearerToTheExactLogitsThanAnF32Program) {
  const auto expected = io::open_weights(golden(GetParam()) + "/expected.safetensors");
  const Tensor prompt = expected->get("prompt"), exact = expected->get("logits_f64"), other = expected->get("logits");
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < prompt.view.num_elements(); ++i)
    tokens.push_back(prompt.dtype() == DType::i64 ? static_cast<int32_t>(prompt.view.as<int64_t>()[i])
                                                  : prompt.view.as<int32_t>()[i]);
  const std::vector<float> ours =
      logits_on("reference", models::open_checkpoint(golden(GetParam())), tokens, StaticKVCacheConfig{}, DType::f32);
  const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
  const test::Deviation here = test::deviation(
                            ours.size(), [&](size_t i) { return ours[i]; }, of(exact)),
                        there = test::deviation(ours.size(), of(other), of(exact));
  EXPECT_GT(there.rms, 0);
  EXPECT_LE(here.rms, there.rms);
}

// Whatever the weights are stored in: bf16 weights are the same numbers everywhere, and the CPU's sums stay within
// the bound of f32 programs, measured by the sums of f32 weights.
TEST_P(GoldenModel, TheCpuStaysWithinTheErrorOfF32) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam()));
  const std::vector<int32_t> tokens = tokens_of(24, checkpoint.model->info().vocab, 7);
  const PagedKVCacheConfig paged{.max_kv_memory_bytes = 1 << 20};
  for (const DType weights : {DType::f32, DType::bf16}) {
    const std::vector<float> exact = logits_on("reference", checkpoint, tokens, StaticKVCacheConfig{}, weights);
    expect_same_bits(exact, logits_on("reference", checkpoint, tokens, paged, weights), "paged");
    const std::vector<float> cpu = logits_on("cpu", checkpoint, tokens, paged, weights);
    const auto expected = io::open_weights(golden(GetParam()) + "/expected.safetensors");
    const Tensor other = expected->get("logits"), other_exact = expected->get("logits_f64");
    const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
    test::expect_f32_error(test::deviation(
                               cpu.size(), [&](size_t i) { return cpu[i]; }, [&](size_t i) { return exact[i]; }),
                           test::deviation(static_cast<size_t>(other.view.num_elements()), of(other), of(other_exact)),
                           std::string(dtype_name(weights)));
  }
}

INSTANTIATE_TEST_SUITE_P(Transformers, GoldenModel,
                         testing::Values("llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "qwen3_moe",
                                         "qwen2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "granitemoehybrid",
                                         "falcon_h1", "nemotron_h", "llama4", "longcat_flash", "deepseek_v4"));

TEST(ReferenceDevice, ServesTheBundledModel) {
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = 6;
  LLM slow(kBundled, open_device("reference"), {}), fast(kBundled, open_device("cpu"), {});
  const Completion expected = fast.generate({"Once upon a time"}, params)[0],
                   completion = slow.generate({"Once upon a time"}, params)[0];
  EXPECT_EQ(completion.token_ids, expected.token_ids);
  EXPECT_EQ(completion.error, "");
}

TEST(ReferenceDevice, TrainsTheBundledModel) {
  const models::Checkpoint checkpoint = models::open_checkpoint(kBundled);
  const auto steps_on = [&](const char* device) {
    train::Trainer trainer(checkpoint.model, open_device(device), {.batch_tokens = 16});
    trainer.load(checkpoint);
    train::Batch batch;
    train::clear(batch);
    const std::vector<int32_t> tokens = tokens_of(17, checkpoint.model->info().vocab, 3);
    const std::vector<uint32_t> document(tokens.begin(), tokens.end());
    train::append_piece(batch, document, 0, 16);
    std::vector<train::StepResult> results;
    for (int step = 0; step < 2; ++step) results.push_back(trainer.step(std::span(&batch, 1), 1e-3));
    return results;
  };
  const std::vector<train::StepResult> exact = steps_on("reference"), cpu = steps_on("cpu");
  for (size_t step = 0; step < exact.size(); ++step) {
    // A chain of n <= 512 products has a relative error of about sqrt(n) 2^-24; forward and backward, about 60 of them
    // lie behind each other, and the second step follows the first.
    const double bound = 60 * std::sqrt(512.0) * 0x1p-24 * static_cast<double>(step + 1);
    EXPECT_NEAR(cpu[step].loss, exact[step].loss, bound * exact[step].loss) << step;
    EXPECT_NEAR(cpu[step].grad_norm, exact[step].grad_norm, bound * exact[step].grad_norm) << step;
  }
  EXPECT_LT(exact[1].loss, exact[0].loss);
}

TEST(ReferenceDevice, RefusesWhatItHasNot) {
  EXPECT_THROW(open_device("reference:1"), NotFound);
  EXPECT_THROW(open_device("reference", {.isa = "avx2"}), InvalidArgument);
  for (const std::string& name : list_devices()) EXPECT_NE(name, "reference");
  EngineOptions options;  // a cache of int8 would have to be encoded anew in every step
  options.hardware.kv_cache = WeightType(DType::f32, &RowEncoding::int8());
  EXPECT_THROW(
      InferEngine::from_checkpoint(models::open_checkpoint(golden("llama")), open_device("reference"), options),
      Unsupported);
}

}  // namespace
}  // namespace eadem::engine
