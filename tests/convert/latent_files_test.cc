// SPDX-License-Identifier: Apache-2.0
//
// The converter on Kimi Linear, Mistral 4 and DeepSeek V4: to GGUF and back, and what stays in f32 whatever the type of
// matrices.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/convert/convert.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/f32_error.h"

namespace eadem::convert {
namespace latent_files_test {

namespace fs = std::filesystem;

class Converted : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_latent_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::string golden(const char* model) {
    return (fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / model).string();
  }

  std::string convert(const std::string& path, const char* name, const std::string& type) {
    const std::string out = (folder_ / name).string();
    ConvertEvents events;
    events.note = [&](const std::string& text) { notes_ += text + "\n"; };
    convert_model(path, out, {.type = type, .threads = 1, .tokenizer = false}, events);
    return out;
  }

  static void forward(const std::string& path) {
    const auto engine =
        engine::InferEngine::from_checkpoint(models::open_checkpoint(path), open_device("cpu", {.num_threads = 1}), {});
    engine->forward({.input_ids = {5, 6, 7, 8}, .input_lengths = {4}, .cache_lengths = {0}});
    const Tensor logits = engine->logits();
    for (int64_t i = 0; i < logits.view.num_elements(); ++i) ASSERT_TRUE(std::isfinite(logits.view.as<float>()[i]));
  }

  fs::path folder_;
  std::string notes_;
};

class LatentFiles : public Converted, public testing::WithParamInterface<const char*> {
 protected:
  static std::string golden() { return Converted::golden(GetParam()); }
};

// -exp(a) is rounded, and its logarithm as well: 4 u (1 + |a|), with |a| < 3.
TEST_P(LatentFiles, ToGgufAndBackKeepTheBits) {
  const std::string back = convert(convert(golden(), "model.gguf", "as-is"), "back", "as-is");
  const models::Checkpoint a = models::open_checkpoint(golden()), b = models::open_checkpoint(back);
  EXPECT_EQ(*a.model->config(), *b.model->config());
  ASSERT_EQ(a.weights->tensors().size(), b.weights->tensors().size());
  for (const io::WeightInfo& info : a.weights->tensors()) {
    ASSERT_NE(b.weights->find(info.name), nullptr) << info.name;
    const Tensor x = a.weights->get(info.name), y = b.weights->get(info.name);
    ASSERT_EQ(to_string(x.view), to_string(y.view)) << info.name;
    if (!info.name.ends_with("A_log")) {
      EXPECT_EQ(std::memcmp(x.view.data, y.view.data, static_cast<size_t>(x.view.size_bytes())), 0) << info.name;
    }
    for (int64_t i = 0; info.name.ends_with("A_log") && i < x.view.num_elements(); ++i)
      EXPECT_NEAR(x.view.as<float>()[i], y.view.as<float>()[i], 0x1p-20);
  }
  const bool kimi = std::string_view(GetParam()) == "kimi_linear";
  EXPECT_EQ(notes_.find("norms of latents have the epsilon") != std::string::npos, kimi) << notes_;
}

// Other programs read convolutions and numbers for each head in f32 only.
TEST_P(LatentFiles, VectorsAndConvolutionsStayInF32) {
  const std::string narrow = convert(golden(), "narrow", "bf16");
  const auto expect_types = [&](const std::string& path, const char* matrices) {
    const auto file = io::GgufFile::open(path);
    for (const io::WeightInfo& info : file->tensors()) {
      const auto is = [&](const char* part) { return info.name.find(part) != std::string::npos; };
      const bool kept = info.shape.rank() == 1 || is(".ssm_a") || is(".ssm_conv1d_") ||
                        (std::string_view(matrices) == "Q8_0" && (is("_hc_fn.") || is(".hc_") || is("_ape.")));
      if (kept) {
        EXPECT_EQ(info.type_name, "F32") << info.name;
      }
      if (info.name == "token_embd.weight" || is(".attn_output_a.")) {
        EXPECT_EQ(info.type_name, matrices);
      }
      if (is("tid2eid")) {
        EXPECT_EQ(info.type_name, "I32");
      }
    }
    forward(path);
  };
  expect_types(convert(golden(), "bf16.gguf", "bf16"), "BF16");
  expect_types(convert(narrow, "narrow.gguf", "as-is"), "BF16");
  // Rows of 28 and of 24 values are no whole blocks.
  const bool whole = std::string_view(GetParam()) == "deepseek_v4_usual";
  expect_types(convert(golden(), "q8_0.gguf", "q8_0"), whole ? "Q8_0" : "F16");
}

INSTANTIATE_TEST_SUITE_P(Convert, LatentFiles, testing::Values("kimi_linear", "mistral4_usual", "deepseek_v4_usual"));

// A layer that predicts a further token is not computed, and not written either: nothing counts it then.
TEST_F(Converted, LeavesFurtherLayersOut) {
  const std::string plain = convert(golden("deepseek_v4_usual"), "plain.gguf", "as-is");
  const auto file = io::GgufFile::open(plain);
  io::GgufMetadata metadata = file->metadata();
  const std::vector<int32_t> ratios = {0, 4, 128, 0};
  const std::vector<float> limits(4, 1.0F);
  for (auto& [key, value] : metadata) {
    if (key == "deepseek4.block_count") value = io::GgufValue::scalar(uint32_t{4});
    if (key == "deepseek4.attention.compress_ratios") value = io::GgufValue::scalars(std::span<const int32_t>(ratios));
    if (key.starts_with("deepseek4.swiglu_clamp")) value = io::GgufValue::scalars(std::span<const float>(limits));
  }
  metadata.emplace_back("deepseek4.nextn_predict_layers", io::GgufValue::scalar(uint32_t{1}));
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  for (const io::WeightInfo& info : file->tensors())
    tensors.push_back({info.name, kept.emplace_back(file->get(info.name)).view});
  tensors.push_back({"blk.3.nextn.eh_proj.weight", kept.front().view});
  const std::string longer = (folder_ / "longer.gguf").string();
  io::write_gguf(longer, metadata, tensors);

  const auto back = io::GgufFile::open(convert(longer, "back.gguf", "as-is"));
  EXPECT_EQ(back->metadata(), file->metadata());
  EXPECT_EQ(back->tensors().size(), file->tensors().size());
  forward(back->path());
}

// Rows of blocks mean what they hold wherever they are seen in another shape: matrices of groups of the output, stacks
// of experts. Kernels read them in f32; sums are in another order than those of decoded matrices.
TEST_F(Converted, BlocksMeanWhatTheyHold) {
  const std::string golden_path = golden("deepseek_v4_usual");
  const models::Checkpoint blocks = models::open_checkpoint(convert(golden_path, "q8_0.gguf", "q8_0"));
  const auto expected = io::open_weights(golden_path + "/expected.safetensors");
  const Tensor prompt = expected->get("prompt"), single = expected->get("logits"), exact = expected->get("logits_f64");
  const auto logits_of = [&](const models::Checkpoint& checkpoint) {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.max_logit_rows = options.max_num_batched_tokens = 160;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    const int32_t* ids = prompt.view.as<int32_t>();
    const auto count = static_cast<int32_t>(prompt.view.num_elements());
    engine->forward(
        {.input_ids = {ids, ids + count}, .input_lengths = {count}, .cache_lengths = {0}, .all_logits = true});
    return engine->logits();
  };
  const Tensor read = logits_of(blocks), decoded = logits_of(models::huggingface_form(blocks));
  const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
  const auto count = static_cast<size_t>(exact.view.num_elements());
  test::expect_f32_error(test::deviation(count, of(read), of(decoded)), test::deviation(count, of(single), of(exact)),
                         "q8_0");
}

// Experts of DeepSeek V4 as published are blocks of MXFP4, which stay as they are; 8-bit floats are decoded.
class PublishedFiles : public LatentFiles {};

TEST_P(PublishedFiles, ExpertsStayInFourBits) {
  const std::string published = (fs::path(EADEM_SOURCE_DIR) / "tests/data/checkpoints" / GetParam()).string(),
                    written = convert(published, "model.gguf", "as-is");
  EXPECT_NE(notes_.find("there are 2 streams of hidden states"), std::string::npos) << notes_;
  const models::Checkpoint a = models::open_checkpoint(published), b = models::open_checkpoint(written);
  EXPECT_EQ(b.weights->find("blk.0.ffn_up_exps.weight")->type_name, "MXFP4");
  EXPECT_EQ(b.weights->find("blk.0.attn_output_a.weight")->type_name, "F32");
  const models::ParameterReader from(a), to(b);
  for (const models::ParameterInfo& parameter : a.model->parameters()) {
    const Tensor x = models::values_in_f32(from.read(parameter.name).view),
                 y = models::values_in_f32(to.read(parameter.name).view);
    ASSERT_EQ(to_string(x.view), to_string(y.view)) << parameter.name;
    EXPECT_EQ(std::memcmp(x.view.data, y.view.data, static_cast<size_t>(x.view.size_bytes())), 0) << parameter.name;
  }
  forward(written);
}

INSTANTIATE_TEST_SUITE_P(Convert, PublishedFiles, testing::Values("deepseek_v4_fp4"));

}  // namespace latent_files_test
}  // namespace eadem::convert
