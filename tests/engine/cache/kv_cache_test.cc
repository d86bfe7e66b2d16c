// SPDX-License-Identifier: Apache-2.0
//
// The promises of property_test.cc for every type of KV cache: a sequence gives the same bits alone and in any batch,
// for any chunking, from a contiguous and from a paged cache, on any number of threads, fused and op by op. Memory is
// what the types say.
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "tests/engine/engine_helpers.h"

namespace eadem::engine {
namespace kv_cache_test {

struct KvSetup {
  std::string kv;
  EngineSetup setup = {};
};

std::unique_ptr<InferEngine> make_engine(const KvSetup& kv) {
  EngineSetup setup = kv.setup;
  setup.options.hardware.kv_cache = kv_cache_type(kv.kv).value();
  return engine::make_engine(setup);
}

class EveryKvType : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Types, EveryKvType, testing::Values("f32", "bf16", "f16", "int8", "fp8_e4m3"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(EveryKvType, ChunksThreadsCachesAndFusionsDoNotChangeBits) {
  for (const char* model : {"llama", "qwen2", "mistral", "llama4"})
    for (Isa isa : available_isas()) {
      const KvSetup base{GetParam(),
                         {.model = golden(model), .threads = 1, .isa = std::string(isa_name(isa)), .options = {}}};
      const auto engine = make_engine(base);
      const std::vector<std::vector<int32_t>> one = {tokens_of(40, engine->model().info().vocab, 1)};
      const std::string where = fmt::format(" on {}, {}", isa_name(isa), model);
      const std::vector<float> whole = logits_of(*engine, one, 40)[0];
      for (float logit : whole) ASSERT_TRUE(std::isfinite(logit)) << where;
      expect_same_bits(whole, logits_of(*engine, one, 13)[0], "chunks of 13" + where);
      expect_same_bits(whole, logits_of(*engine, one, 1)[0], "token by token" + where);
      KvSetup setup = base;
      setup.setup.threads = 3;
      expect_same_bits(whole, logits_of(*make_engine(setup), one, 7)[0], "three threads" + where);
      setup = base;
      setup.setup.options.op_by_op = true;
      expect_same_bits(whole, logits_of(*make_engine(setup), one, 40)[0], "op by op" + where);
      for (int64_t block_size : {1, 5, 16}) {
        setup = base;
        setup.setup.options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 4 << 20, .block_size = block_size};
        expect_same_bits(whole, logits_of(*make_engine(setup), one, 17)[0],
                         fmt::format("blocks of {}{}", block_size, where));
      }
    }
}

// Heads as wide and as many as tiles multiply (kernels/cpu/attention/tiled_rows.h), where the cache is bf16; 70 tokens
// are in two chunks of keys, and the rows of a prompt in several groups.
TEST_P(EveryKvType, WideHeadsDoNotChangeBitsEither) {
  expect_same_bits_on_every_isa(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 48,
          "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 18, "num_key_value_heads": 2,
          "head_dim": 32, "rms_norm_eps": 1e-05, "vocab_size": 72, "max_position_embeddings": 128,
          "rope_theta": 10000.0, "tie_word_embeddings": false})",
      GetParam(), 70);
}

TEST_P(EveryKvType, BatchMatesDoNotChangeBits) {
  KvSetup setup{GetParam()};
  setup.setup.options.cache = StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 48};
  const auto engine = make_engine(setup);
  const int64_t vocab = engine->model().info().vocab;
  const std::vector<std::vector<int32_t>> all = {tokens_of(24, vocab, 1), tokens_of(24, vocab, 2),
                                                 tokens_of(24, vocab, 3)};
  const auto together = logits_of(*engine, all, 5);
  for (size_t i = 0; i < all.size(); ++i) {
    expect_same_bits(logits_of(*engine, {all[i]}, 24)[0], together[i], "in a batch of three");
  }
}

TEST_P(EveryKvType, CachesTakeTheMemoryThatTheTypeSays) {
  KvSetup setup{GetParam()};
  setup.setup.options.cache = StaticKVCacheConfig{.max_batch_size = 2, .max_cache_len = 32};
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
  const auto engine = make_engine(KvSetup{.kv = "int8"});
  EXPECT_EQ(engine->hardware().of(modules::Role::attention, 0).precision.kv_cache.value,
            WeightType(DType::f32, &RowEncoding::int8()));
  EXPECT_EQ(engine->hardware().of(modules::Role::attention, 0).precision.kv_cache.source,
            OptionSource::explicit_argument);
}

}  // namespace kv_cache_test
}  // namespace eadem::engine
