// SPDX-License-Identifier: Apache-2.0
//
// A GGUF file as the directory in Hugging Face layout that states the same model.
#include "eadem/models/huggingface.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/models/family.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;
using io::GgufValue;

const fs::path kGolden = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/llama";

// Rows of a head in the order of llama.cpp's converter: its halves, as [2, head_dim / 2], transposed.
Tensor interleaved(const TensorView& halves, int64_t head_dim) {
  const Tensor result = Tensor::on_host(halves.dtype, halves.shape);
  const int64_t rows = halves.shape[0], columns = halves.num_elements() / rows;
  for (int64_t head = 0; head < rows / head_dim; ++head)
    for (int64_t half = 0; half < 2; ++half)
      for (int64_t i = 0; i < head_dim / 2; ++i)
        std::memcpy(result.view.as<float>() + (head * head_dim + 2 * i + half) * columns,
                    halves.as<float>() + (head * head_dim + half * (head_dim / 2) + i) * columns,
                    static_cast<size_t>(columns) * sizeof(float));
  return result;
}

class HuggingFace : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_hf_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    golden_ = open_checkpoint(kGolden.string());
    config_ = *golden_.model->config();
    for (const ParameterInfo& parameter : golden_.model->parameters()) names_.push_back(parameter.name);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The golden model as a GGUF file; `extra` tensors, and a change of the metadata.
  std::string write_gguf(const std::vector<io::NamedTensor>& extra = {}, int64_t rotated = 0,
                         const BlockEncoding* blocks = nullptr) {
    io::GgufMetadata metadata = {{"general.architecture", GgufValue::string("llama")}};
    const auto integer = [&](const char* key, int64_t value) {
      metadata.emplace_back(std::string("llama.") + key, GgufValue::scalar(static_cast<uint32_t>(value)));
    };
    integer("context_length", config_.max_position_embeddings);
    integer("embedding_length", config_.hidden_size);
    integer("block_count", config_.num_hidden_layers);
    integer("feed_forward_length", config_.intermediate_size);
    integer("attention.head_count", config_.num_attention_heads);
    integer("attention.head_count_kv", config_.num_key_value_heads);
    integer("rope.dimension_count", rotated > 0 ? rotated : config_.head_dim);
    integer("vocab_size", config_.vocab_size);
    metadata.emplace_back("llama.attention.layer_norm_rms_epsilon",
                          GgufValue::scalar(static_cast<float>(config_.rms_norm_eps)));
    metadata.emplace_back("llama.rope.freq_base", GgufValue::scalar(static_cast<float>(config_.rope_theta)));
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors = extra;
    for (const std::string& name : names_) {
      kept.push_back(golden_.weights->get(name));
      if (name.find("q_proj") != std::string::npos || name.find("k_proj") != std::string::npos) {
        kept.push_back(interleaved(kept.back().view, config_.head_dim));
        if (blocks != nullptr) {
          const Tensor encoded = Tensor::in_one_piece(DType::f32, kept.back().shape(), *blocks);
          blocks->encode(encoded.view, kept.back().view);
          kept.push_back(encoded);
        }
      }
      tensors.push_back({gguf_name(name), kept.back().view});
    }
    const std::string path = (folder_ / "model.gguf").string();
    io::write_gguf(path, metadata, tensors);
    return path;
  }

  static void expect_equal(const TensorView& a, const TensorView& b, const std::string& name) {
    ASSERT_EQ(to_string(a), to_string(b)) << name;
    EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.size_bytes())), 0) << name;
  }

  fs::path folder_;
  Checkpoint golden_;
  ModelConfig config_;
  std::vector<std::string> names_;
};

TEST_F(HuggingFace, AGgufFileHasTheWeightsAndTheConfigurationOfTheDirectoryItCameFrom) {
  const Checkpoint gguf = open_checkpoint(write_gguf());
  ASSERT_EQ(gguf.model->config()->rope_style, kernels::RopeStyle::interleaved);
  const Checkpoint converted = huggingface_form(gguf);
  const ModelConfig& config = *converted.model->config();
  EXPECT_EQ(config.rope_style, kernels::RopeStyle::rotate_half);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, config_.rms_norm_eps);
  for (const std::string& name : names_) {
    EXPECT_EQ(ParameterReader(converted).tensors_of(name), std::set<std::string>{name});
    expect_equal(converted.weights->get(name).view, golden_.weights->get(name).view, name);
  }
  EXPECT_EQ(converted.weights->tensors().size(), golden_.weights->tensors().size());
  EXPECT_EQ(huggingface_form(golden_).weights, golden_.weights) << "a directory is what it is";
}

// An engine of the GGUF file saves what an engine of the directory saves, and it reads back with the same logits.
TEST_F(HuggingFace, WhatIsSavedIsADirectoryWithTheSameLogits) {
  const Checkpoint gguf = open_checkpoint(write_gguf());
  engine::EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.hardware.weights = DType::f32;
  options.max_logit_rows = options.max_num_batched_tokens = 128;
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto engine = engine::InferEngine::from_checkpoint(gguf, device, options);
  const std::string saved = (folder_ / "deep/saved").string();
  save_huggingface(engine->model(), engine->state_dict(), saved);
  const Checkpoint read = open_checkpoint(saved);
  for (const std::string& name : names_)
    expect_equal(read.weights->get(name).view, golden_.weights->get(name).view, name);

  const auto expected = io::open_weights((kGolden / "expected.safetensors").string());
  const Tensor prompt = expected->get("prompt"), exact = expected->get("logits_f64"), torch = expected->get("logits");
  const auto logits_of = [&](const Checkpoint& checkpoint) {
    const auto serving = engine::InferEngine::from_checkpoint(checkpoint, device, options);
    engine::InferEngine::Input input;
    input.input_ids.assign(prompt.view.as<int32_t>(), prompt.view.as<int32_t>() + prompt.view.num_elements());
    input.input_lengths = {static_cast<int32_t>(input.input_ids.size())};
    input.cache_lengths = {0};
    input.all_logits = true;
    serving->forward(input);
    return serving->logits();
  };
  // The bound of tests/engine/golden_test.cc: PyTorch's own f32 error, times what a maximum varies by.
  double torch_error = 0;
  for (int64_t i = 0; i < exact.view.num_elements(); ++i)
    torch_error =
        std::max(torch_error, std::abs(static_cast<double>(torch.view.as<float>()[i]) - exact.view.as<float>()[i]));
  for (const Checkpoint& checkpoint : {gguf, read, huggingface_form(gguf)}) {
    const Tensor logits = logits_of(checkpoint);
    double error = 0;
    for (int64_t i = 0; i < exact.view.num_elements(); ++i)
      error = std::max(error, std::abs(static_cast<double>(logits.view.as<float>()[i]) - exact.view.as<float>()[i]));
    EXPECT_LE(error, 8 * torch_error);
  }
}

TEST_F(HuggingFace, QuantizedRowsThatMoveAreTheirDecodedValues) {
  const BlockEncoding* blocks = BlockEncoding::find("q8_0");
  const Checkpoint gguf = open_checkpoint(write_gguf({}, 0, blocks));
  const std::string name = "model.layers.1.self_attn.k_proj.weight";
  const Tensor halves = golden_.weights->get(name), got = huggingface_form(gguf).weights->get(name);
  ASSERT_EQ(got.view.encoding, nullptr);
  // Rows are quantized one by one, so that their order does not enter.
  const Tensor encoded = Tensor::in_one_piece(DType::f32, halves.shape(), *blocks);
  blocks->encode(encoded.view, halves.view);
  const Tensor expected = Tensor::on_host(DType::f32, halves.shape());
  blocks->decode(expected.view, encoded.view);
  expect_equal(got.view, expected.view, name);
}

// The factor is found from any frequency that is divided, also where none is divided by all of it.
TEST(Llama3Scaling, IsToldFromDivisors) {
  for (const double theta : {5000.0, 500000.0})
    for (const double factor : {8.0, 32.0, 2.5}) {
      ModelConfig config = ModelConfig::from_json(io::JsonReader::parse(
          fmt::format(R"({{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
                           "num_hidden_layers": 1, "num_attention_heads": 4, "rope_theta": {},
                           "rope_scaling": {{"rope_type": "llama3", "factor": {}, "low_freq_factor": 1,
                                             "high_freq_factor": 4, "original_max_position_embeddings": 8192}}}})",
                      theta, factor),
          "config.json"));
      const ModelConfig stated = config;
      config.rope_divisors = gguf_divisors(config);
      for (double& divisor : config.rope_divisors) divisor = static_cast<float>(divisor);
      EXPECT_EQ(config.rope_divisors.back() < factor, theta == 5000);
      config.rope_scaling = {};
      EXPECT_EQ(huggingface_config(config, nullptr).rope_scaling, stated.rope_scaling) << theta << ", " << factor;
    }
}

TEST_F(HuggingFace, WhatADirectoryCannotStateIsRefused) {
  const Tensor divisors = Tensor::on_host(DType::f32, Shape{config_.head_dim / 2});
  std::fill_n(divisors.view.as<float>(), config_.head_dim / 2, 3.0f);
  EXPECT_HAS(test::refusal([&] {
               huggingface_form(open_checkpoint(write_gguf({{"rope_freqs.weight", divisors.view}})));
             }),
             "Unsupported: ");
  EXPECT_HAS(test::refusal([&] { huggingface_form(open_checkpoint(write_gguf({}, config_.head_dim / 2))); }),
             "cannot state a rotation of a part of each head");
}

}  // namespace
}  // namespace eadem::models
