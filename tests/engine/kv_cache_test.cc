// SPDX-License-Identifier: Apache-2.0
//
// The promises of property_test.cc for every type of KV cache: a sequence gives the same bits alone and in any batch,
// for any chunking, from a contiguous and from a paged cache, on any number of threads, fused and op by op. Memory is
// what the types say.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/engine/llm.h"

namespace eadem::engine {
namespace {

std::string golden(const std::string& name) {
  return (std::filesystem::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name).string();
}

struct EngineSetup {
  std::string kv;
  std::string model = golden("llama");
  int threads = 2;
  std::string isa;
  EngineOptions options;
};

std::unique_ptr<InferEngine> make_engine(const EngineSetup& setup) {
  EngineOptions options = setup.options;
  options.max_logit_rows = 128;
  options.hardware.kv_cache = kv_cache_type(setup.kv).value();
  return InferEngine::from_checkpoint(models::open_checkpoint(setup.model),
                                      open_device("cpu", {.num_threads = setup.threads, .isa = setup.isa}), options);
}

std::vector<int32_t> tokens_of(int64_t count, int64_t vocab, int32_t seed) {
  std::vector<int32_t> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<int32_t>((7919 * i + 104729 * seed + 13) % vocab));
  return result;
}

// Logits of every token of the sequences, which advance together by `chunk` tokens a step.
std::vector<std::vector<float>> logits_of(InferEngine& engine, const std::vector<std::vector<int32_t>>& sequences,
                                          size_t chunk) {
  std::vector<std::vector<float>> result(sequences.size());
  const modules::CacheSpec& cache = engine.cache_spec();
  const auto per_sequence =
      static_cast<int32_t>((engine.max_sequence_length() + cache.block_size - 1) / cache.block_size);
  for (size_t done = 0; done < sequences[0].size(); done += chunk) {
    InferEngine::Input input;
    input.all_logits = true;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const std::vector<int32_t>& tokens = sequences[s];
      const size_t count = std::min(chunk, tokens.size() - done);
      input.input_ids.insert(input.input_ids.end(), tokens.begin() + static_cast<std::ptrdiff_t>(done),
                             tokens.begin() + static_cast<std::ptrdiff_t>(done + count));
      input.input_lengths.push_back(static_cast<int32_t>(count));
      input.cache_lengths.push_back(static_cast<int32_t>(done));
      if (cache.layout != modules::CacheLayout::paged) continue;
      std::vector<int32_t> blocks;  // in falling order: nothing may depend on where they lie
      for (int32_t b = 0; b < per_sequence; ++b) blocks.push_back((static_cast<int32_t>(s) + 1) * per_sequence - 1 - b);
      input.block_tables.push_back(std::move(blocks));
    }
    engine.forward(input);
    const Tensor logits = engine.logits();
    const int64_t vocab = logits.shape()[1];
    const float* row = logits.view.as<float>();
    for (size_t s = 0; s < sequences.size(); ++s) {
      result[s].insert(result[s].end(), row, row + input.input_lengths[s] * vocab);
      row += input.input_lengths[s] * vocab;
    }
  }
  return result;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  ASSERT_FALSE(a.empty());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

class EveryKvType : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Types, EveryKvType, testing::Values("f32", "bf16", "f16", "int8", "fp8_e4m3"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(EveryKvType, ChunksThreadsCachesAndFusionsDoNotChangeBits) {
  for (const char* model : {"llama", "qwen2", "mistral"})
    for (Isa isa : available_isas()) {
      const EngineSetup base{.kv = GetParam(), .model = golden(model), .threads = 1, .isa = std::string(isa_name(isa))};
      const auto engine = make_engine(base);
      const std::vector<std::vector<int32_t>> one = {tokens_of(40, engine->model().info().vocab, 1)};
      const std::string where = fmt::format(" on {}, {}", isa_name(isa), model);
      const std::vector<float> whole = logits_of(*engine, one, 40)[0];
      for (float logit : whole) ASSERT_TRUE(std::isfinite(logit)) << where;
      expect_same_bits(whole, logits_of(*engine, one, 13)[0], "chunks of 13" + where);
      expect_same_bits(whole, logits_of(*engine, one, 1)[0], "token by token" + where);
      EngineSetup setup = base;
      setup.threads = 3;
      expect_same_bits(whole, logits_of(*make_engine(setup), one, 7)[0], "three threads" + where);
      setup = base;
      setup.options.op_by_op = true;
      expect_same_bits(whole, logits_of(*make_engine(setup), one, 40)[0], "op by op" + where);
      for (int64_t block_size : {1, 5, 16}) {
        setup = base;
        setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = block_size};
        expect_same_bits(whole, logits_of(*make_engine(setup), one, 17)[0],
                         fmt::format("blocks of {}{}", block_size, where));
      }
    }
}

TEST_P(EveryKvType, BatchMatesDoNotChangeBits) {
  EngineSetup setup{.kv = GetParam()};
  setup.options.cache = StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 48};
  const auto engine = make_engine(setup);
  const int64_t vocab = engine->model().info().vocab;
  const std::vector<std::vector<int32_t>> all = {tokens_of(24, vocab, 1), tokens_of(24, vocab, 2),
                                                 tokens_of(24, vocab, 3)};
  const auto together = logits_of(*engine, all, 5);
  for (size_t i = 0; i < all.size(); ++i) {
    engine->reset_cache();
    expect_same_bits(logits_of(*engine, {all[i]}, 24)[0], together[i], "in a batch of three");
  }
}

TEST_P(EveryKvType, CachesTakeTheMemoryThatTheTypeSays) {
  EngineSetup setup{.kv = GetParam()};
  setup.options.cache = StaticKVCacheConfig{.max_batch_size = 2, .max_cache_len = 32};
  const auto engine = make_engine(setup);
  const models::ModelInfo& info = engine->model().info();
  const std::string kv = GetParam();
  const int64_t row = kv == "f32"                   ? 4 * info.head_dim
                      : kv == "bf16" || kv == "f16" ? 2 * info.head_dim
                                                    : info.head_dim + 4;  // codes and a scale
  const int64_t per_token = 2 * info.layers * info.kv_heads * row;
  EXPECT_EQ(engine->cache_bytes(), 2 * 32 * per_token);
  engine->reset_cache(PagedKVCacheConfig{.max_kv_memory_bytes = 10 * 16 * per_token + 1, .block_size = 16});
  EXPECT_EQ(engine->cache_spec().num_blocks, 10);
  EXPECT_EQ(engine->cache_bytes(), 10 * 16 * per_token);
}

TEST(KvCache, LeafRemembersWhoSetIt) {
  const auto engine = make_engine({.kv = "int8"});
  EXPECT_EQ(engine->hardware().of(modules::Role::attention, 0).precision.kv_cache.value,
            WeightType(DType::f32, &RowEncoding::int8()));
  EXPECT_EQ(engine->hardware().of(modules::Role::attention, 0).precision.kv_cache.origin, Origin::explicit_argument);
}

}  // namespace
}  // namespace eadem::engine
