// SPDX-License-Identifier: Apache-2.0
//
// A request's logits on a CUDA device are its own, bit for bit: however its prompt is cut into steps, whatever is
// beside it, wherever its keys are kept, and with fusions or without. The model has random weights, in bf16, in 8-bit
// floats, in q4_k or in groups of 4 bits, and the shapes that the tensor-core kernels of Hopper take. Other devices run
// it, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/engine/llm.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "tests/engine/decode_steps.h"

namespace eadem::engine {
namespace {

class CudaEngine : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '_');
    path_ = std::filesystem::temp_directory_path() / fmt::format("eadem_cuda_{}.json", name);
    io::write_file_atomically(path_.string(), R"({
      "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
      "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
      "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false})");
    checkpoint_ = models::open_config(path_.string());
  }
  void TearDown() override {
    if (!path_.empty()) std::filesystem::remove(path_);
  }

  // Null: bf16.
  static const Encoding* encoding_of_weights() {
    if (const Encoding* floats = Fp8Encoding::find(GetParam())) return floats;
    if (const Encoding* groups = GroupEncoding::find(GetParam())) return groups;
    return BlockEncoding::find(GetParam());
  }

  std::unique_ptr<InferEngine> make(EngineOptions options = {}) {
    options.max_logit_rows = 1024;
    if (std::get_if<StaticKVCacheConfig>(&options.cache) != nullptr)
      options.cache = StaticKVCacheConfig{.max_batch_size = 3, .max_cache_len = 512};
    modules::ModelSpec spec = models::spec_of(checkpoint_);
    if (const Encoding* encoding = encoding_of_weights()) {
      spec.checkpoint_type_of = [encoding](const std::string& parameter) -> std::optional<WeightType> {
        if (parameter.find("proj") == std::string::npos) return WeightType(DType::bf16);
        return WeightType(DType::f32, encoding);
      };
      spec.checkpoint_type = WeightType(DType::f32, encoding);
      spec.checkpoint_source = "the test";
    }
    auto engine = std::make_unique<InferEngine>(checkpoint_.model, open_device("cuda"), options, spec);
    engine->load_random(1, 0.05);
    return engine;
  }

  static constexpr int64_t kTokens = 300;  // more than one span of attention, more rows than one product streams
  std::filesystem::path path_;
  models::Checkpoint checkpoint_;
};

TEST_P(CudaEngine, ChunkingDoesNotChangeBits) {
  const auto engine = make();
  const std::vector<int32_t> tokens = tokens_of(kTokens, 1000, 1);
  const std::vector<float> whole = logits_in_chunks(*engine, tokens, {300});
  expect_same_bits(whole, logits_in_chunks(*engine, tokens, {130, 1, 65, 64, 40}), "130 + 1 + 65 + 64 + 40");
  expect_same_bits(whole, logits_in_chunks(*engine, tokens, std::vector<int>(300, 1)), "token by token");
}

TEST_P(CudaEngine, CachesAndFusionsDoNotChangeBits) {
  const std::vector<int32_t> tokens = tokens_of(kTokens, 1000, 2);
  const std::vector<int> chunks = {200, 1, 99};
  const std::vector<float> expected = logits_in_chunks(*make(), tokens, chunks);
  for (const int64_t block_size : {16, 64}) {
    EngineOptions options;
    options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 8 << 20, .block_size = block_size};
    expect_same_bits(expected, logits_in_chunks(*make(options), tokens, chunks), fmt::format("block {}", block_size));
  }
  for (const char* fusion : {"add_rms_norm", "linear_gated_activation", "linear_qkv", "rope_append_attention",
                             "rope_qk_append", "rope_kv_append", "rope_append_attention_quantize", "rms_norm_quantize",
                             "add_rms_norm_quantize", "linear_gated_activation_quantize", "all"}) {
    EngineOptions options;
    options.disabled_fusions = {fusion};
    expect_same_bits(expected, logits_in_chunks(*make(options), tokens, chunks), fusion);
  }
}

TEST_P(CudaEngine, BatchMatesDoNotChangeBits) {
  const auto engine = make();
  const std::vector<std::vector<int32_t>> three = {tokens_of(kTokens, 1000, 3), tokens_of(kTokens, 1000, 4),
                                                   tokens_of(kTokens, 1000, 5)};
  const std::vector<std::vector<float>> together = logits_at(*engine, three, {100, 101, 102, 250, 300});
  for (size_t i = 0; i < three.size(); ++i)
    expect_same_bits(together[i], logits_at(*engine, {three[i]}, {300})[0], fmt::format("sequence {}", i));
}

// Hooks see values that a kernel has rounded for products as numbers again, which lie near the values before rounding.
// An int8 code is off by half a step, of which the largest of 256 columns has 127. A code of e4m3 has three bits behind
// its leading one, so it is off by 1/16 of the value; the smallest code but 0 is 2^-6, where the row's largest is 448,
// and half of it is the error around 0. A tenth is added for the rounding of scales.
TEST_P(CudaEngine, HooksSeeValuesThatWereRounded) {
  EngineOptions options;
  options.disabled_fusions = {"all"};
  const auto engine = make(options);
  std::map<std::string, std::vector<float>> values;
  engine->hooks().register_hook("model.layers.0.*", [&](const std::string& name, const TensorView& tensor, int) {
    const Tensor widened = converted_on_host(tensor, DType::f32);
    const auto* data = static_cast<const float*>(widened.view.data);
    values[name].assign(data, data + widened.view.shape.num_elements());
  });
  constexpr int kRows = 20;
  logits_in_chunks(*engine, tokens_of(kRows, 1000, 1), {kRows});
  int compared = 0;
  for (const auto& [name, rounded] : values) {
    const auto whole = values.find(name.substr(0, name.rfind('.')));
    if (whole == values.end()) continue;
    ++compared;
    ASSERT_EQ(rounded.size(), whole->second.size()) << name;
    const bool in_chunks = name.ends_with("int8_chunks");
    const size_t columns = in_chunks ? 256 : rounded.size() / kRows;
    for (size_t begin = 0; begin < rounded.size(); begin += columns) {
      const std::span of(whole->second.data() + begin, columns);
      float largest = 0;
      for (const float value : of) largest = std::max(largest, std::abs(value));
      EXPECT_GT(largest, 0) << name;
      for (size_t i = 0; i < columns; ++i) {
        const float step = in_chunks ? largest / 127 : std::max(std::abs(of[i]) / 8, largest / 448 / 64);
        EXPECT_NEAR(rounded[begin + i], of[i], 0.55f * step) << name << " " << begin + i;
      }
    }
  }
  const auto& device = static_cast<const CudaDevice&>(*open_device("cuda"));
  EXPECT_EQ(compared > 0, device.hopper_refusal().empty() && encoding_of_weights() != nullptr);
}

// Steps that are recorded and replayed, filled up to a bucket, against those that a hook keeps from both.
TEST_P(CudaEngine, ReplayedStepsHaveTheBitsOfOthers) {
  EngineOptions options;
  options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 8 << 20, .block_size = 16, .max_batch_size = 7};
  const auto engine = make(options), plain = make(options);
  plain->hooks().register_hook("sample.token", [](const std::string&, const TensorView&, int) {});
  for (const size_t sequences : {1, 3, 5, 7}) {
    std::vector<std::vector<int32_t>> prompts;
    for (size_t s = 0; s < sequences; ++s)
      prompts.push_back(tokens_of(30 + 10 * static_cast<int64_t>(s), 1000, static_cast<int32_t>(s)));
    const Decoded expected = decode_greedily(*plain, prompts, 20, 0);
    expect_same(expected, decode_greedily(*engine, prompts, 20, 0), fmt::format("{} sequences", sequences));
    for (const int ahead : {1, InferEngine::kMostSubmitted - 1})
      expect_same(expected, decode_greedily(*engine, prompts, 20, ahead), fmt::format("{} ahead", ahead));
  }
  EXPECT_EQ(plain->programs().programs().size(), 2u);
  const auto& programs = engine->programs().programs();  // prefill, decode, and those of 1, 4 and 7 (of at most 7)
  ASSERT_EQ(programs.size(), 5u);
  for (size_t i = 2; i < programs.size(); ++i) EXPECT_TRUE(programs[i]->program->is_recorded()) << i;
}

// Products of 8-bit floats and of K-quants take rows that were rounded once for all their readers, most of them by the
// norm.
TEST_P(CudaEngine, ProductsRunWhereTheirTypesAreFast) {
  const auto device = open_cuda_device(0);
  if (const std::string& why = static_cast<const CudaDevice&>(*device).hopper_refusal(); !why.empty())
    GTEST_SKIP() << why;
  const auto engine = make();
  const bool rounds = encoding_of_weights() != nullptr;
  const char* kernel = Fp8Encoding::find(GetParam()) != nullptr ? "cuda_fp8" : rounds ? "cuda_int8" : "cuda_mma_chain";
  const pipeline::Program& program = *engine->programs().programs().front()->program;
  int norms = 0;
  for (size_t n = 0; n < program.graph().nodes().size(); ++n) {
    const std::string_view op = program.graph().nodes()[n].op->name();
    const bool head = program.graph().nodes()[n].scope.find("lm_head") != std::string::npos;
    if (op.starts_with("linear")) {
      EXPECT_EQ(program.choices()[n].kernel->name, head ? "cuda_mma_chain" : kernel) << op;
    }
    if (op == "rms_norm_quantize" || op == "add_rms_norm_quantize") ++norms;
  }
  EXPECT_EQ(norms, rounds ? 6 : 0);  // two in each layer; the head's is not a norm of all rows
}

// A loop gives the device each step before it reads the results of the one before, and tokens are the same.
TEST(CudaLoop, StepsAheadGiveTheTokensOfStepsOneByOne) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  EngineOptions options;
  options.cache = PagedKVCacheConfig{.block_size = 16, .max_batch_size = 4, .max_cache_len = 128};
  LLM llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cuda"), options);
  const auto run = [&](std::optional<bool> runs_ahead) {
    std::vector<SamplingParams> params(4);
    std::vector<EngineLoop::Job> jobs;
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].temperature = i % 2 == 0 ? 0 : 1;
      params[i].seed = 5;
      params[i].max_tokens = 20 + 15 * static_cast<int64_t>(i);
      const std::vector<int32_t> prompt = tokens_of(3 + 7 * static_cast<int64_t>(i), 300, static_cast<int32_t>(i));
      jobs.push_back({{.prompt = prompt, .sampling = params[i].settings(1), .max_tokens = params[i].max_tokens},
                      OutputProcessor(llm.tokenizer(), params[i], llm.eos_token_ids(), prompt, 1)});
    }
    EngineLoop(llm.engine(), nullptr, runs_ahead).run(jobs);
    EXPECT_EQ(llm.engine().num_waiting(), 0);
    std::vector<std::pair<std::vector<int32_t>, std::vector<float>>> result;
    for (EngineLoop::Job& job : jobs)
      result.emplace_back(job.output.completion().token_ids, job.output.completion().logprobs);
    return result;
  };
  const auto expected = run(false);
  EXPECT_EQ(run(true), expected);
  EXPECT_EQ(run({}), expected);
}

INSTANTIATE_TEST_SUITE_P(Weights, CudaEngine, testing::Values("bf16", "fp8_e4m3_channel", "q4_k", "int4_g128_f16"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace eadem::engine
