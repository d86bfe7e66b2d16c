// SPDX-License-Identifier: Apache-2.0
//
// The promises of property_test.cc, for quantized weights of every kind: a sequence gives the same bits alone and in
// any batch, for any chunking of its prompt, from a contiguous and from a paged cache, on one thread and on three.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/models/auto_model.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::engine {
namespace {

// Widths of whole blocks of 256; two layers, grouped queries, tied embeddings.
constexpr const char* kConfig = R"({"model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
  "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu",
  "rope_theta": 10000.0})";

// The same with experts in the place of the MLPs.
constexpr const char* kExperts = R"({"model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512,
  "moe_intermediate_size": 256, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": true,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
  "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu",
  "rope_theta": 10000.0})";

struct Options {
  int threads = 2;
  std::string isa;
  EngineOptions options;
  const char* config = kConfig;
};

std::unique_ptr<InferEngine> engine_with(const Encoding& encoding, const Options& setup = {}) {
  const auto model = models::model_from_config(io::JsonReader::parse(setup.config, "config"));
  modules::ModelSpec spec = model->spec();
  spec.checkpoint_type = WeightType(DType::f32, &encoding);
  spec.checkpoint_source = "the test";
  EngineOptions options = setup.options;
  options.max_logit_rows = 128;
  auto engine = std::make_unique<InferEngine>(
      model, open_device("cpu", {.num_threads = setup.threads, .isa = setup.isa}), options, spec);
  engine->load_random(7, 0.05);
  return engine;
}

struct Sequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> blocks;  // of a paged cache
};

Sequence sequence(int seed) {
  Sequence result;
  for (int i = 0; i < 24; ++i) result.tokens.push_back((i * 37 + seed * 11) % 300);
  for (int i = 0; i < 8; ++i) result.blocks.push_back(8 * seed + 7 - i);
  return result;
}

// Logits of every token of the sequences, which advance together by `chunk` tokens a step.
std::vector<std::vector<float>> logits_of(InferEngine& engine, const std::vector<Sequence>& sequences, size_t chunk) {
  std::vector<std::vector<float>> result(sequences.size());
  const bool paged = engine.cache_spec().layout == modules::CacheLayout::paged;
  for (size_t done = 0;; done += chunk) {
    InferEngine::Input input;
    input.all_logits = true;
    bool any = false;
    for (const Sequence& s : sequences) {
      const size_t begin = std::min(done, s.tokens.size()), end = std::min(done + chunk, s.tokens.size());
      any = any || end > begin;
      input.input_ids.insert(input.input_ids.end(), s.tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                             s.tokens.begin() + static_cast<std::ptrdiff_t>(end));
      input.input_lengths.push_back(static_cast<int32_t>(end - begin));
      input.cache_lengths.push_back(static_cast<int32_t>(begin));
      if (paged) input.block_tables.push_back(s.blocks);
    }
    if (!any) return result;
    engine.forward(input);
    const Tensor step_logits = engine.logits();
    const float* logits = step_logits.view.as<float>();
    for (size_t i = 0; i < sequences.size(); ++i) {
      const int64_t count = input.input_lengths[i] * int64_t{300};
      result[i].insert(result[i].end(), logits, logits + count);
      logits += count;
    }
  }
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  ASSERT_FALSE(a.empty());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

std::vector<const Encoding*> every_encoding() {
  std::vector<const Encoding*> result;
  for (const auto& type : workloads::quantized_types()) result.push_back(type.encoding);
  return result;
}

class EveryEncoding : public testing::TestWithParam<const Encoding*> {};
INSTANTIATE_TEST_SUITE_P(Encodings, EveryEncoding, testing::ValuesIn(every_encoding()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(EveryEncoding, ChunksThreadsCachesAndFusionsDoNotChangeBits) {
  const std::vector<Sequence> one = {sequence(1)};
  const auto engine = engine_with(*GetParam());
  const std::vector<float> whole = logits_of(*engine, one, 64)[0];
  for (float logit : whole) ASSERT_TRUE(std::isfinite(logit));
  engine->reset_cache();
  expect_same_bits(whole, logits_of(*engine, one, 7)[0], "chunks of 7");
  engine->reset_cache();
  expect_same_bits(whole, logits_of(*engine, one, 1)[0], "token by token");
  Options paged;
  paged.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = 5};
  expect_same_bits(whole, logits_of(*engine_with(*GetParam(), paged), one, 10)[0], "paged cache");
  expect_same_bits(whole, logits_of(*engine_with(*GetParam(), {.threads = 3}), one, 64)[0], "three threads");
  Options plain;
  plain.options.op_by_op = true;
  expect_same_bits(whole, logits_of(*engine_with(*GetParam(), plain), one, 64)[0], "op by op");
}

TEST_P(EveryEncoding, BatchMatesDoNotChangeBits) {
  Options setup;
  setup.options.cache = StaticKVCacheConfig{.max_batch_size = 4, .max_cache_len = 64};
  const auto engine = engine_with(*GetParam(), setup);
  const std::vector<Sequence> all = {sequence(0), sequence(1), sequence(2), sequence(3)};
  for (size_t chunk : {size_t{1}, size_t{9}}) {
    engine->reset_cache();
    const auto together = logits_of(*engine, all, chunk);
    for (size_t i = 0; i < all.size(); ++i) {
      engine->reset_cache();
      expect_same_bits(logits_of(*engine, {all[i]}, 64)[0], together[i], "in a batch of four");
    }
  }
}

// A token's result depends neither on its batch mates, which choose experts of their own, nor on how it is served.
TEST_P(EveryEncoding, ExpertsKeepThePromises) {
  Options setup{.config = kExperts};
  setup.options.cache = StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 64};
  const auto engine = engine_with(*GetParam(), setup);
  const std::vector<Sequence> all = {sequence(0), sequence(1), sequence(2)};
  const auto together = logits_of(*engine, all, 9);
  for (float logit : together[1]) ASSERT_TRUE(std::isfinite(logit));
  for (size_t i = 0; i < all.size(); ++i) {
    engine->reset_cache();
    expect_same_bits(logits_of(*engine, {all[i]}, 64)[0], together[i], "in a batch of three");
  }
  engine->reset_cache();
  expect_same_bits(together[1], logits_of(*engine, {all[1]}, 1)[0], "token by token");
  Options paged{.threads = 3, .config = kExperts};
  paged.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = 5};
  expect_same_bits(together[1], logits_of(*engine_with(*GetParam(), paged), {all[1]}, 10)[0], "paged, three threads");
}

TEST(QuantizedModels, EveryInstructionSetKeepsThePromises) {
  for (const Encoding* encoding : std::initializer_list<const Encoding*>{
           BlockEncoding::find("q4_0"), BlockEncoding::find("q4_k"), BlockEncoding::find("q6_k"),
           GroupEncoding::find("int4_g128_f16_zeros"), GroupEncoding::find("int8_row_bf16"),
           Fp8Encoding::find("fp8_e4m3_block128")})
    for (Isa isa : available_isas()) {
      SCOPED_TRACE(fmt::format("{} {}", encoding->name(), isa_name(isa)));
      const std::vector<Sequence> one = {sequence(2)};
      Options setup{.threads = 1, .isa = std::string(isa_name(isa))};
      const auto engine = engine_with(*encoding, setup);
      const std::vector<float> whole = logits_of(*engine, one, 64)[0];
      engine->reset_cache();
      expect_same_bits(whole, logits_of(*engine, one, 1)[0], "token by token");
      setup.threads = 3;
      expect_same_bits(whole, logits_of(*engine_with(*encoding, setup), one, 5)[0], "three threads");
    }
}

// Run with the weights that the blocks decode to, in f32, the model differs by the rounding of activations to 8 bits
// alone. The largest of 32 normal values is about 2.1 sigma, a unit 1 / 127 of that, and rounding to units leaves
// 2.1 / (127 sqrt(12)) = 0.5% of sigma in each product. Fifteen products follow one another in two layers and the head:
// errors that do not know of each other add to 0.5% sqrt(15) = 1.9% of the logits. Where an output has one scale, x has
// one for 256 values, whose largest is about 2.9 sigma: 2.6%.
TEST_P(EveryEncoding, IsCloseToTheDecodedWeightsInF32) {
  const auto quantized = engine_with(*GetParam());
  const auto decoded = [&] {
    const auto model = models::model_from_config(io::JsonReader::parse(kConfig, "config"));
    modules::ModelSpec spec = model->spec();
    spec.checkpoint_type = DType::f32;
    EngineOptions options;
    options.max_logit_rows = 128;
    auto engine = std::make_unique<InferEngine>(model, open_device("cpu", {.num_threads = 2}), options, spec);
    for (const std::string& name : engine->parameters().names())
      engine->load_param(name, quantized->parameters().to_host(name).view);
    return engine;
  }();
  const std::vector<Sequence> one = {sequence(3)};
  const std::vector<float> a = logits_of(*quantized, one, 64)[0], b = logits_of(*decoded, one, 64)[0];
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  const GroupEncoding* groups = GroupEncoding::of(GetParam());
  EXPECT_LT(std::sqrt(error / size), groups != nullptr && groups->format().group_size == 0 ? 0.026 : 0.019);
  EXPECT_EQ(error == 0.0, Fp8Encoding::of(GetParam()) != nullptr);  // floats are multiplied as f32
}

}  // namespace
}  // namespace eadem::engine
