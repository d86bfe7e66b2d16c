// SPDX-License-Identifier: Apache-2.0
//
// Decode steps of one sequence by the persistent kernel, on Hopper: its tokens, their probabilities and the logits have
// the bits of separate kernels, wherever splits of attention and blocks of the cache end. The model has two layers of a
// shape that the kernel is compiled for, random weights and a small vocabulary.
#include <gtest/gtest.h>
#include <unistd.h>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "tests/engine/decode_steps.h"

namespace eadem::engine {
namespace {

constexpr int kVocab = 1000;

struct Layers {
  const char* shape;
  const char* sizes;  // of config.json
  const char* weights;
};
constexpr const char* kLlama8b = R"("hidden_size": 4096, "intermediate_size": 14336)";
constexpr const char* kLlama1b = R"("hidden_size": 2048, "intermediate_size": 8192)";

class CudaDecoderLayers : public testing::TestWithParam<Layers> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = open_cuda_device(0);
    if (const std::string& why = static_cast<const CudaDevice&>(*device_).hopper_refusal(); !why.empty())
      GTEST_SKIP() << why;
    path_ = std::filesystem::temp_directory_path() / fmt::format("eadem_cuda_decoder_layers_{}.json", getpid());
    io::write_file_atomically(path_.string(), fmt::format(R"({{{}, "num_hidden_layers": 2,
      "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
      "vocab_size": 1000, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384,
      "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": false}})",
                                                          GetParam().sizes));
    checkpoint_ = models::open_config(path_.string());
  }
  void TearDown() override {
    if (!path_.empty()) std::filesystem::remove(path_);
  }

  std::unique_ptr<InferEngine> make(int64_t block_size, std::vector<std::string> disabled_fusions) {
    EngineOptions options;
    options.cache = PagedKVCacheConfig{.block_size = block_size, .max_batch_size = 2, .max_cache_len = 8704};
    options.max_num_batched_tokens = 8704;
    options.disabled_fusions = std::move(disabled_fusions);
    modules::ModelSpec spec = models::spec_of(checkpoint_);
    spec.checkpoint_type_of = [](const std::string& parameter) -> std::optional<WeightType> {
      return parameter.find("proj") == std::string::npos ? WeightType(DType::bf16) : type_of(parameter);
    };
    spec.checkpoint_type = type_of("");
    spec.checkpoint_source = "the test";
    auto engine = std::make_unique<InferEngine>(checkpoint_.model, device_, options, spec);
    engine->load_random(1, 0.02);
    return engine;
  }

  static WeightType type_of(const std::string& parameter) {
    if (GetParam().weights == std::string_view("bf16")) return WeightType(DType::bf16);
    return WeightType(DType::f32, encoding_of(parameter));
  }

  // "mixed": those of Q4_K_M in layer 0; in layer 1 q6_k wherever that has q4_k, but for up_proj.
  static const Encoding* encoding_of(const std::string& parameter) {
    const std::string weights = GetParam().weights;
    if (weights == "mixed") {
      const auto is = [&](const char* part) { return parameter.find(part) != std::string::npos; };
      const bool more = is("v_proj") || is("down_proj"), is_first = is("layers.0.");
      return BlockEncoding::find(more == is_first && !(is("up_proj") && !is_first) ? "q6_k" : "q4_k");
    }
    if (const Encoding* groups = GroupEncoding::find(weights)) return groups;
    if (const Encoding* floats = Fp8Encoding::find(weights)) return floats;
    return BlockEncoding::find(weights);
  }

  std::shared_ptr<Device> device_;
  std::filesystem::path path_;
  models::Checkpoint checkpoint_;
};

TEST_P(CudaDecoderLayers, HaveTheBitsOfSeparateKernels) {
  constexpr int kSteps = 40;
  // From the second token on, over the ends of one split and of two, with more splits than a warp merges at once,
  // and with more than all warps do.
  const int64_t lengths[] = {1, 20, 245, 500, 900, 2030, 8420};
  const auto expected_of = make(16, {"decoder_layer"});
  for (const int64_t block_size : {16, 48, 64}) {
    const auto engine = make(block_size, {});
    for (const int64_t length : lengths) {
      const std::vector<std::vector<int32_t>> prompts = {tokens_of(length, kVocab, static_cast<int32_t>(length))};
      const Decoded expected = decode_greedily(*expected_of, prompts, kSteps, 0);
      for (const int ahead : {0, InferEngine::kMostSubmitted - 1})
        expect_same(expected, decode_greedily(*engine, prompts, kSteps, ahead),
                    fmt::format("{} tokens, blocks of {}, {} ahead", length, block_size, ahead));
    }
  }
}

// A sequence is computed by the kernel when it is alone, and by others beside a second one.
TEST_P(CudaDecoderLayers, BatchMatesDoNotChangeBits) {
  constexpr int kSteps = 8;
  const auto engine = make(16, {});
  const std::vector<std::vector<int32_t>> two = {tokens_of(250, kVocab, 1), tokens_of(30, kVocab, 2)};
  const Decoded together = decode_greedily(*engine, two, kSteps, 0);
  for (size_t s = 0; s < two.size(); ++s) {
    const Decoded alone = decode_greedily(*engine, {two[s]}, kSteps, 0);
    for (size_t step = 0; step < together.tokens.size(); ++step) {
      EXPECT_EQ(alone.tokens[step][0], together.tokens[step][s]) << "sequence " << s << ", step " << step;
      expect_same_bits({alone.logprobs[step]}, {together.logprobs[2 * step + s]},
                       fmt::format("sequence {}, step {}", s, step));
    }
  }
}

// A hook sees what is inside layers in decode steps, too.
TEST_P(CudaDecoderLayers, HideNothingFromHooks) {
  const auto engine = make(16, {});
  int seen = 0;
  engine->hooks().register_hook("model.layers.1.mlp.*", [&](const std::string&, const TensorView& tensor, int) {
    if (tensor.shape[0] == 1) ++seen;
  });
  constexpr int kSteps = 3;
  decode_greedily(*engine, {tokens_of(30, kVocab, 1)}, kSteps, 0);
  EXPECT_GE(seen, kSteps);
}

TEST_P(CudaDecoderLayers, AreOneLaunch) {
  const auto engine = make(16, {});
  decode_greedily(*engine, {tokens_of(30, kVocab, 1)}, 2, 0);
  int launches = 0;
  for (const auto& entry : engine->programs().programs()) {
    const pipeline::Program& program = *entry->program;
    if (!program.is_recorded()) continue;
    for (const pipeline::FusionDecision& decision : program.fusion_decisions())
      if (decision.fusion.starts_with("decoder_layer")) {
        EXPECT_TRUE(decision.applied) << decision.reason;
      }
    for (size_t n = 0; n < program.graph().nodes().size(); ++n)
      if (program.graph().nodes()[n].op->name() == "decoder_layers") {
        EXPECT_EQ(program.choices()[n].kernel->name, "cuda_persistent");
        ++launches;
      }
  }
  EXPECT_EQ(launches, 1);
}

std::vector<Layers> all_layers() {
  std::vector<Layers> all;
  for (const auto& [shape, sizes] : {std::pair("llama_8b", kLlama8b), std::pair("llama_1b", kLlama1b)})
    for (const char* weights :
         {"int4_g128_f16", "int4_g128_bf16", "int4_g128_f16_zeros", "q4_k", "q6_k", "mixed", "fp8_e4m3_channel"})
      all.push_back({shape, sizes, weights});
  all.push_back({"llama_1b", kLlama1b, "bf16"});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Weights, CudaDecoderLayers, testing::ValuesIn(all_layers()),
                         [](const auto& info) { return fmt::format("{}_{}", info.param.shape, info.param.weights); });

}  // namespace
}  // namespace eadem::engine
