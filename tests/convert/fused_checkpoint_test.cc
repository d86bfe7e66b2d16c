// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints whose tensors are not the model's parameters: fused projections, transposed matrices, a head that stands
// for the embedding. They load, save and convert in both directions, and give the bits of the plain checkpoint.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "eadem/convert/weights.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/family.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;
using test::refusal;

// What Phi-3 (qkv_proj, gate_up_proj) and GPT-2 (transposed matrices) do, on a Llama model.
std::vector<WeightRecipe> fused_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                        CheckpointFormat format) {
  const bool gguf = format == CheckpointFormat::gguf;
  const size_t dot = parameter.name.find('.', std::string("model.layers.").size());
  const std::string layer = parameter.name.substr(0, dot), number = layer.substr(layer.rfind('.') + 1);
  const auto is = [&](const char* part) { return parameter.name.find(part) != std::string::npos; };
  const int64_t q = config.num_attention_heads * config.head_dim, kv = config.kv_dim(), ffn = config.intermediate_size;
  const auto part = [&](const char* hf, const char* ggml, int64_t begin, int64_t size, int64_t whole) {
    return std::vector<WeightRecipe>{
        WeightRecipe::slice(gguf ? "blk." + number + ggml : layer + hf, 0, begin, size, whole)};
  };
  const auto qkv = [&](int64_t begin, int64_t size) {
    return part(".self_attn.qkv_proj.weight", ".attn_qkv.weight", begin, size, q + 2 * kv);
  };
  if (is("q_proj.weight")) return qkv(0, q);
  if (is("k_proj.weight")) return qkv(q, kv);
  if (is("v_proj.weight")) return qkv(q + kv, kv);
  if (is("gate_proj.weight")) return part(".mlp.gate_up_proj.weight", ".ffn_up.weight", 0, ffn, 2 * ffn);
  if (is("up_proj.weight")) return part(".mlp.gate_up_proj.weight", ".ffn_up.weight", ffn, ffn, 2 * ffn);
  if (is("o_proj.weight") && !gguf)
    return {WeightRecipe::transpose(WeightRecipe::name(layer + ".self_attn.c_proj.weight"))};
  if (is("embed_tokens") && !gguf) return {WeightRecipe::name("transformer.wte.weight")};
  return {};
}

class FusedCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_fused_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    plain_ = open_checkpoint((fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/qwen3").string());
    family_ = plain_.model->config()->family();
    family_.recipes = fused_recipes;
    model_ = std::make_shared<Decoder>(*plain_.model->config(), family_);
    const std::string path = (folder_ / "model.safetensors").string();
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const auto& [name, recipe] : tensors_of(*model_, CheckpointFormat::huggingface)) {
      kept.push_back(evaluate(
          recipe, [&](const std::string& own) { return plain_.weights->get(own); }, path));
      tensors.push_back({name, kept.back().view});
    }
    io::write_safetensors(path, tensors);
    fused_ = with_weights(path);
  }
  void TearDown() override { fs::remove_all(folder_); }

  Checkpoint with_weights(const std::string& file) const {
    return {file, model_, io::open_weights(file), plain_.config_path};
  }

  // Runs the converter.
  std::string convert(const Checkpoint& source, const std::string& file, const std::string& type) {
    const std::string path = (folder_ / file).string();
    const bool gguf = path.ends_with(".gguf");
    std::vector<convert::ConvertedTensor> tensors = convert::plan_weights(source, {gguf, type});
    std::vector<io::TensorHeader> headers;
    for (const convert::ConvertedTensor& tensor : tensors) headers.push_back(tensor.header());
    const auto writer = gguf ? io::begin_gguf(path, {{"general.architecture", io::GgufValue::string("qwen3")}}, headers)
                             : io::begin_safetensors(path, headers, {});
    ThreadPool pool(1);
    convert::convert_weights(tensors, source, nullptr, pool, *writer, [](int64_t, int64_t, const std::string&) {});
    writer->commit();
    return path;
  }

  std::vector<float> logits_of(const Checkpoint& checkpoint) const {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.max_logit_rows = options.max_num_batched_tokens = 128;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    engine::InferEngine::Input input;
    for (int32_t i = 0; i < 20; ++i) input.input_ids.push_back(3 + 5 * i % 90);
    input.input_lengths = {20};
    input.cache_lengths = {0};
    input.all_logits = true;
    engine->forward(input);
    const Tensor logits = engine->logits();
    return {logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements()};
  }

  static void expect_same_tensors(const io::WeightSource& a, const io::WeightSource& b) {
    ASSERT_EQ(a.tensors().size(), b.tensors().size());
    for (const io::WeightInfo& info : a.tensors()) {
      ASSERT_NE(b.find(info.name), nullptr) << info.name;
      const Tensor x = a.get(info.name), y = b.get(info.name);
      ASSERT_EQ(to_string(x.view), to_string(y.view)) << info.name;
      EXPECT_EQ(std::memcmp(x.view.data, y.view.data, static_cast<size_t>(x.view.size_bytes())), 0) << info.name;
    }
  }

  fs::path folder_;
  Checkpoint plain_, fused_;
  ModelFamily family_;
  std::shared_ptr<const Decoder> model_;
};

TEST_F(FusedCheckpoint, LoadsWithTheBitsOfThePlainOne) {
  EXPECT_NE(fused_.weights->find("model.layers.1.self_attn.qkv_proj.weight"), nullptr);
  EXPECT_NE(fused_.weights->find("model.layers.0.self_attn.c_proj.weight"), nullptr);
  EXPECT_EQ(fused_.weights->find("model.layers.0.mlp.up_proj.weight"), nullptr);
  EXPECT_EQ(logits_of(fused_), logits_of(plain_));
}

TEST_F(FusedCheckpoint, SavesItsOwnTensors) {
  const ParameterReader reader(fused_);
  std::vector<std::pair<std::string, Tensor>> state;
  for (const ParameterInfo& parameter : model_->parameters())
    state.emplace_back(parameter.name, reader.read(parameter.name));
  save_huggingface(*model_, state, (folder_ / "saved").string());
  expect_same_tensors(*fused_.weights, *io::open_weights((folder_ / "saved").string()));
}

TEST_F(FusedCheckpoint, ConvertsToGgufAndBack) {
  const Checkpoint gguf = with_weights(convert(fused_, "model.gguf", "as-is"));
  EXPECT_NE(gguf.weights->find("blk.0.attn_qkv.weight"), nullptr);
  EXPECT_EQ(logits_of(gguf), logits_of(plain_));
  expect_same_tensors(*fused_.weights, *io::open_weights(convert(gguf, "back.safetensors", "as-is")));
}

// The rows of q, k and v stay in the type that the fused matrix has; a mixture gives it the best of theirs.
TEST_F(FusedCheckpoint, QuantizedRowsAreServedAsTheyAre) {
  const Checkpoint q8 = with_weights(convert(fused_, "q8.gguf", "q8_0"));
  const std::string v = "model.layers.1.self_attn.v_proj.weight";
  const std::optional<RecipeType> type = ParameterReader(q8).type(v);
  ASSERT_TRUE(type.has_value());
  const Tensor whole = q8.weights->get("blk.1.attn_qkv.weight");
  EXPECT_EQ(type->type, WeightType(whole.dtype(), whole.view.encoding));
  EXPECT_EQ(spec_of(q8).checkpoint_type_of(v), type->type);
  if (whole.view.encoding != nullptr) {
    const Tensor rows = ParameterReader(q8).read(v);
    EXPECT_EQ(rows.view.encoding, whole.view.encoding);
  }
  EXPECT_EQ(logits_of(q8).size(), logits_of(plain_).size());
  const Checkpoint k_m = with_weights(convert(fused_, "q4_k_m.gguf", "q4_k_m"));
  EXPECT_NE(k_m.weights->find("blk.1.attn_qkv.weight")->type, std::nullopt);
}

TEST_F(FusedCheckpoint, WhatDoesNotFitIsRefused) {
  const std::string path = (folder_ / "short.safetensors").string();
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  const auto write = [&](const std::string& changed, const Shape& shape) {
    tensors.clear();
    for (const io::WeightInfo& info : fused_.weights->tensors()) {
      kept.push_back(info.name == changed ? Tensor::on_host(DType::f32, shape) : fused_.weights->get(info.name));
      if (info.name == changed)
        std::memset(kept.back().view.data, 0, static_cast<size_t>(kept.back().view.size_bytes()));
      tensors.push_back({info.name, kept.back().view});
    }
    if (fused_.weights->find(changed) == nullptr) {
      kept.push_back(Tensor::on_host(DType::f32, shape));
      std::memset(kept.back().view.data, 0, static_cast<size_t>(kept.back().view.size_bytes()));
      tensors.push_back({changed, kept.back().view});
    }
    io::write_safetensors(path, tensors);
    return refusal([&] { logits_of(with_weights(path)); });
  };
  const std::string name = "model.layers.0.self_attn.qkv_proj.weight";
  const int64_t rows = fused_.weights->find(name)->shape[0], columns = fused_.weights->find(name)->shape[1];
  EXPECT_HAS(write(name, Shape{rows - 1, columns}),
             fmt::format("DataCorrupted: {}: '{}' is [{}, {}]; expected {} along axis 0", path, name, rows - 1, columns,
                         rows));
  EXPECT_HAS(write("model.layers.0.mlp.up_proj.weight", Shape{3, 3}), "is no parameter of the model");
}

}  // namespace
}  // namespace eadem::models
