// SPDX-License-Identifier: Apache-2.0
//
// Soft caps, windows and sinks, with caches in bf16 and in 8-bit codes, on a CUDA device: a request's logits are its
// own, bit for bit, however its prompt is cut into steps, whatever is beside it, and wherever its keys are kept. The
// models have random weights in bf16 and the shapes that the tensor-core kernels take.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/io/json.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/family.h"
#include "eadem/modules/hybrid/causal_attention.h"
#include "tests/engine/decode_steps.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::engine {
namespace {

// Gemma 2: soft caps of scores that these reach, and a window in every other layer.
constexpr const char* kCapped = R"({
  "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "torch_dtype": "bfloat16",
  "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512,
  "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
  "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "query_pre_attn_scalar": 16,
  "attn_logit_softcapping": 1.5, "final_logit_softcapping": 30.0, "sliding_window": 90})";
// Mistral with a window, whose heads get sinks: the attention of gpt-oss without its experts.
constexpr const char* kSinks = R"({
  "model_type": "mistral", "architectures": ["MistralForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
  "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6,
  "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0, "sliding_window": 128, "tie_word_embeddings": false})";

std::shared_ptr<const models::Model> model_of(const char* json, bool sinks) {
  const auto model = models::model_from_config(io::JsonReader::parse(json, "the test"));
  if (!sinks) return model;
  static models::ModelFamily family;
  static models::DecoderSpec (*decoder)(const models::ModelConfig& config);
  family = model->config()->family();
  decoder = family.decoder;
  family.decoder = [](const models::ModelConfig& config) {
    models::DecoderSpec spec = decoder(config);
    for (modules::LayerSpec& layer : spec.layers) std::get<modules::CausalAttention::Config>(layer.mixer).sinks = true;
    return spec;
  };
  return std::make_shared<models::Decoder>(*model->config(), family);
}

struct Case {
  const char* name;
  const char* config;
  bool sinks;
  const char* kv;
};

class CudaCaches : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    if (kv_cache_type(GetParam().kv)->encoding != nullptr) EADEM_SKIP_WITHOUT_HOPPER();  // other devices refuse codes
    model_ = model_of(GetParam().config, GetParam().sinks);
  }

  std::unique_ptr<InferEngine> make(EngineOptions options = {}) const {
    options.max_logit_rows = 1024;
    options.hardware.kv_cache = {kv_cache_type(GetParam().kv).value(), "the test"};
    if (std::get_if<StaticKVCacheConfig>(&options.cache) != nullptr)
      options.cache = StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 511};
    modules::ModelSpec spec = model_->spec();
    spec.checkpoint_type = WeightType(DType::bf16);
    spec.checkpoint_source = "the test";
    auto engine = std::make_unique<InferEngine>(model_, open_device("cuda"), options, spec);
    engine->load_random(1, 0.05);
    return engine;
  }
  static EngineOptions paged(int64_t block_size, int64_t most_sequences = 8) {
    EngineOptions options;
    options.cache =
        PagedKVCacheConfig{.max_kv_memory_bytes = 16 << 20, .block_size = block_size, .max_batch_size = most_sequences};
    return options;
  }

  static constexpr int64_t kTokens = 300, kVocab = 500;
  std::shared_ptr<const models::Model> model_;
};

TEST_P(CudaCaches, RunOnTensorCores) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const auto engine = make();
  const pipeline::Program& program = *engine->programs().programs().front()->program;
  int attentions = 0;
  for (size_t n = 0; n < program.graph().nodes().size(); ++n)
    if (const std::string_view op = program.graph().nodes()[n].op->name();
        op == "attention" || op == "rope_append_attention") {
      EXPECT_EQ(program.choices()[n].kernel->name, "cuda_mma");
      ++attentions;
    }
  EXPECT_GE(attentions, 2);
}

TEST_P(CudaCaches, StepsAndPlacesDoNotChangeBits) {
  const std::vector<int32_t> tokens = tokens_of(kTokens, kVocab, 1);
  const std::vector<float> whole = logits_in_chunks(*make(), tokens, {300});
  for (const float logit : whole) ASSERT_TRUE(std::isfinite(logit));
  expect_same_bits(whole, logits_in_chunks(*make(), tokens, {130, 1, 65, 64, 40}), "130 + 1 + 65 + 64 + 40");
  for (const int64_t block_size : {16, 32, 48, 64}) {
    const auto engine = make(paged(block_size));
    expect_same_bits(whole, logits_in_chunks(*engine, tokens, {200, 1, 99}), fmt::format("blocks of {}", block_size));
    expect_same_bits(whole, logits_in_chunks(*engine, tokens, std::vector<int>(300, 1)),
                     fmt::format("token by token, blocks of {}", block_size));
  }
  for (const char* fusion : {"rope_append_attention", "rope_qk_append", "rope_kv_append", "all"}) {
    EngineOptions options = paged(16);
    options.disabled_fusions = {fusion};
    expect_same_bits(whole, logits_in_chunks(*make(options), tokens, {200, 1, 99}), fusion);
  }
}

TEST_P(CudaCaches, BatchMatesDoNotChangeBits) {
  const auto engine = make(paged(16, 40));
  std::vector<std::vector<int32_t>> many;
  for (int32_t s = 0; s < 40; ++s) many.push_back(tokens_of(70, kVocab, s));
  const std::vector<std::vector<float>> together = logits_at(*engine, many, {20, 40, 60, 66, 67, 68, 70});
  for (size_t i = 0; i < many.size(); i += 13)
    expect_same_bits(together[i], logits_at(*engine, {many[i]}, {70})[0], fmt::format("sequence {}", i));
}

// Steps that are recorded and replayed, whose tokens come from the device, against those that a hook keeps from both.
TEST_P(CudaCaches, ReplayedStepsHaveTheBitsOfOthers) {
  const auto engine = make(paged(16)), plain = make(paged(16));
  plain->hooks().register_hook("sample.token", [](const std::string&, const TensorView&, int) {});
  std::vector<std::vector<int32_t>> prompts;
  for (int32_t s = 0; s < 5; ++s) prompts.push_back(tokens_of(20 + 40 * s, kVocab, s));
  const Decoded expected = decode_greedily(*plain, prompts, 20, 0);
  expect_same(expected, decode_greedily(*engine, prompts, 20, 0), "tokens from the host");
  expect_same(expected, decode_greedily(*engine, prompts, 20, 1), "tokens from the device");
}

INSTANTIATE_TEST_SUITE_P(Models, CudaCaches,
                         testing::Values(Case{"capped", kCapped, false, "bf16"}, Case{"capped", kCapped, false, "int8"},
                                         Case{"capped", kCapped, false, "fp8_e4m3"},
                                         Case{"sinks", kSinks, true, "bf16"}, Case{"sinks", kSinks, true, "int8"},
                                         Case{"sinks", kSinks, true, "fp8_e4m3"}),
                         [](const auto& info) { return fmt::format("{}_{}", info.param.name, info.param.kv); });

}  // namespace
}  // namespace eadem::engine
