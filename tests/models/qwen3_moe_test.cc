// SPDX-License-Identifier: Apache-2.0
//
// Qwen3 with experts: what its configurations mean, its GGUF files, and checkpoints that store experts in other ways.
// Its logits are compared in tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/f32_error.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace qwen3_moe_test {

namespace fs = std::filesystem;
using test::refusal;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

ModelConfig read_config(const char* name, const char* file) {
  return ModelConfig::from_json(io::JsonReader::read((kGoldens / name / file).string()));
}

io::JsonValue small() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "qwen3_moe").set("vocab_size", 64).set("hidden_size", 32).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 4).set("num_attention_heads", 4).set("num_key_value_heads", 2);
}

TEST(Qwen3Moe, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = parse(small());
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.num_experts, 128);
  EXPECT_EQ(config.num_experts_per_tok, 8);
  EXPECT_EQ(config.moe_intermediate_size, 768);
  EXPECT_FALSE(config.norm_topk_prob);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_EQ(config.layer_windows, (std::vector<int64_t>{0, 0, 0, 0}));
  for (int64_t layer = 0; layer < 4; ++layer) EXPECT_TRUE(config.has_experts(layer));
  EXPECT_EQ(parse(small().set("use_sliding_window", true)).layer_windows[3], 4096);
  EXPECT_EQ(parse(small().set("use_sliding_window", true).set("sliding_window", nullptr)).layer_windows[3], 0);
}

TEST(Qwen3Moe, LayersWithExperts) {
  const auto layers = [](io::JsonValue json) {
    const ModelConfig config = parse(json);
    std::string text;
    for (int64_t layer = 0; layer < 4; ++layer) text += config.has_experts(layer) ? 'e' : 'd';
    return text;
  };
  EXPECT_EQ(layers(small().set("decoder_sparse_step", 2)), "dede");
  EXPECT_EQ(layers(small().set("mlp_only_layers", io::JsonValue::array().push_back(0).push_back(2))), "dede");
  EXPECT_EQ(layers(small().set("mlp_only_layers", nullptr)), "eeee");
}

TEST(Qwen3Moe, OldAndNewKeysMeanTheSame) {
  for (const char* name : {"qwen3_moe", "qwen3_moe_all"}) {
    const ModelConfig config = read_config(name, "config.json");
    EXPECT_EQ(io::to_json(config.describe()), io::to_json(read_config(name, "config.classic.json").describe())) << name;
    EXPECT_EQ(parse(config.to_json()), config) << name;
  }
  EXPECT_EQ(parse(small().set("num_local_experts", 16)).num_experts, 16);
  EXPECT_HAS(refusal([] { parse(small().set("num_experts", 16).set("num_local_experts", 8)); }),
             "'num_experts' is 16 and 'num_local_experts' 8");
}

// transformers adds it only when it returns the logits of routers.
TEST(Qwen3Moe, TheLoadBalancingLossIsOnWithTheLogitsOfRouters) {
  const auto coef = [](io::JsonValue json) { return parse(json).router_aux_loss_coef; };
  EXPECT_EQ(coef(small().set("router_aux_loss_coef", 0.01)), 0);
  EXPECT_EQ(coef(small().set("output_router_logits", false).set("router_aux_loss_coef", 0.01)), 0);
  EXPECT_EQ(coef(small().set("output_router_logits", true).set("router_aux_loss_coef", 0.01)), 0.01);
  EXPECT_EQ(coef(small().set("output_router_logits", true)), 0.001);
  const ModelConfig config = parse(small().set("output_router_logits", true).set("router_aux_loss_coef", 0.01));
  EXPECT_EQ(parse(config.to_json()), config);
}

TEST(Qwen3Moe, WhatDoesNotFitTogetherIsRefused) {
  EXPECT_HAS(refusal([] { parse(small().set("num_experts", 4)); }), "8 of 4 experts compute a token");
  EXPECT_HAS(refusal([] { parse(small().set("num_experts", 0)); }), "'num_experts'");
  EXPECT_HAS(refusal([] { parse(small().set("moe_intermediate_size", int64_t{1} << 31).set("hidden_size", 1 << 20)); }),
             "weights of 128 experts");
  EXPECT_HAS(refusal([] { parse(small().set("shared_expert_intermediate_size", 64)); }),
             "'shared_expert_intermediate_size'");
}

TEST(Qwen3Moe, LayersAreWhatTheSpecSays) {
  const Decoder model(read_config("qwen3_moe", "config.json"));
  const auto& layers = model.decoder_spec().layers;
  ASSERT_EQ(layers.size(), 3u);
  const auto& experts = std::get<modules::MoeMlp::Config>(layers[0].mlp);
  EXPECT_EQ(experts.experts, 8);
  EXPECT_EQ(experts.ffn, 20);
  EXPECT_EQ(experts.route.top_k, 2);
  EXPECT_FALSE(experts.route.renormalize);
  EXPECT_EQ(std::get<modules::DenseMlp::Config>(layers[1].mlp).ffn, 40);
  // Eight of attention and norms a layer, four of experts or three of an MLP; embedding, norm, head.
  EXPECT_EQ(parameters_of(model.decoder_spec()).size(), 3 + 3 * 8 + 4 + 3 + 4u);
}

class Qwen3MoeFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_moe_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    golden_ = open_checkpoint((kGoldens / "qwen3_moe_all").string());
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const io::GgufMetadata& metadata) const {
    const ParameterReader reader(golden_);
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const auto& [name, recipe] : tensors_of(*golden_.model, CheckpointFormat::gguf)) {
      kept.push_back(evaluate(
          recipe, [&](const std::string& own) { return reader.read(own); }, name));
      tensors.push_back({name, kept.back().view});
    }
    const std::string path = (folder_ / "model.gguf").string();
    io::write_gguf(path, metadata, tensors);
    return path;
  }

  // In f32; weights that are stored in blocks are decoded.
  static std::vector<float> logits_of(const Checkpoint& checkpoint, std::vector<int32_t> ids = {}) {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.hardware.weights = DType::f32;
    options.max_logit_rows = options.max_num_batched_tokens = 64;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    engine::InferEngine::Input input;
    if (ids.empty())
      for (int32_t i = 0; i < 30; ++i) ids.push_back(3 + 5 * i % 90);
    input.input_ids = ids;
    input.input_lengths = {static_cast<int32_t>(ids.size())};
    input.cache_lengths = {0};
    input.all_logits = true;
    engine->forward(input);
    const Tensor logits = engine->logits();
    return {logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements()};
  }

  fs::path folder_;
  Checkpoint golden_;
};

// The gguf package wrote the files, transformers computed with the values of their blocks.
TEST_F(Qwen3MoeFiles, AFileOfTheGgufPackageGivesTheLogitsOfTransformers) {
  for (const std::string name : {"qwen3_moe_all", "qwen2_moe"}) {
    const Checkpoint checkpoint = open_checkpoint((kGoldens / name / "model-q8_0.gguf").string());
    const ParameterReader reader(checkpoint);
    const std::string experts = "model.layers.0.mlp.experts.up_proj.weight";
    EXPECT_EQ(reader.type(experts)->type.encoding, BlockEncoding::find("q8_0"));
    EXPECT_EQ(reader.type(experts)->shape, (Shape{checkpoint.model->config()->num_experts, 32, 32}));
    const auto expected = io::open_weights((kGoldens / name / "expected.q8_0.safetensors").string());
    const Tensor prompt = expected->get("prompt"), f64 = expected->get("logits_f64"), f32 = expected->get("logits");
    const int32_t* ids = prompt.view.as<int32_t>();
    const std::vector<float> actual = logits_of(checkpoint, {ids, ids + prompt.view.num_elements()});
    ASSERT_EQ(static_cast<int64_t>(actual.size()), f64.view.num_elements());
    const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
    test::expect_f32_error(test::deviation(
                               actual.size(), [&](size_t i) { return actual[i]; }, of(f64)),
                           test::deviation(actual.size(), of(f32), of(f64)), name);
  }
}

TEST_F(Qwen3MoeFiles, GgufHasTheBitsOfTheDirectory) {
  const std::string path = write(golden_.model->config()->to_gguf());
  const Checkpoint gguf = open_checkpoint(path);
  EXPECT_EQ(*gguf.model->config(), [&] {
    ModelConfig expected = *golden_.model->config();
    expected.checkpoint_dtype.reset();  // which a GGUF file does not state, nor the ids of its tokenizer
    expected.bos_token_id.clear();
    expected.eos_token_id.clear();
    expected.rms_norm_eps = gguf.model->config()->rms_norm_eps;  // f32 there
    return expected;
  }());
  EXPECT_EQ(logits_of(gguf), logits_of(golden_));
  // And back: a tensor for each expert.
  const Checkpoint back = huggingface_form(gguf);
  EXPECT_EQ(logits_of(back), logits_of(golden_));
  for (const io::WeightInfo& info : golden_.weights->tensors()) {
    ASSERT_NE(back.weights->find(info.name), nullptr) << info.name;
    const Tensor a = golden_.weights->get(info.name), b = back.weights->get(info.name);
    ASSERT_EQ(to_string(a.view), to_string(b.view)) << info.name;
    EXPECT_EQ(std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())), 0) << info.name;
  }
}

TEST_F(Qwen3MoeFiles, KeysOfGgufFiles) {
  io::GgufMetadata metadata = golden_.model->config()->to_gguf();
  std::erase_if(metadata, [](const auto& entry) { return entry.first == "qwen3moe.expert_feed_forward_length"; });
  EXPECT_EQ(ModelConfig::from_gguf(*io::GgufFile::open(write(metadata))).moe_intermediate_size, 64 / 3)
      << "what llama.cpp takes then";
  metadata.emplace_back("qwen3moe.expert_shared_count", io::GgufValue::scalar(uint32_t{1}));
  EXPECT_HAS(refusal([&] { open_checkpoint(write(metadata)); }),
             "'qwen3moe.expert_shared_count' is 1; only 0 is honoured");
}

TEST_F(Qwen3MoeFiles, WhatGgufCannotStateIsRefused) {
  const auto refused = [&](auto&& change) {
    ModelConfig config = *golden_.model->config();
    change(config);
    return refusal([&] { config.to_gguf(); });
  };
  EXPECT_EQ(refused([](ModelConfig&) {}), "");
  EXPECT_HAS(refused([](ModelConfig& c) { c.norm_topk_prob = false; }), "norm_topk_prob");
  EXPECT_HAS(refused([](ModelConfig& c) { c.mlp_only_layers = {1}; }), "layer 1 without experts");
  EXPECT_HAS(refused([](ModelConfig& c) { c.layer_windows.assign(2, 16); }), "an attention window");
}

// What transformers 5 keeps in memory, and other programs save.
TEST_F(Qwen3MoeFiles, ExpertsInOneTensorHaveTheBitsOfSeparateOnes) {
  const Decoder& model = static_cast<const Decoder&>(*golden_.model);
  const ParameterReader reader(golden_);
  std::vector<NamedRecipe> fused;
  for (const ParameterInfo& parameter : model.parameters())
    fused.emplace_back(parameter.name, model.recipes(parameter, CheckpointFormat::huggingface).back());
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  for (const auto& [name, recipe] : invert(fused)) {
    kept.push_back(evaluate(
        recipe, [&](const std::string& own) { return reader.read(own); }, name));
    tensors.push_back({name, kept.back().view});
  }
  const std::string path = (folder_ / "model.safetensors").string();
  io::write_safetensors(path, tensors);
  const Checkpoint checkpoint{path, golden_.model, io::open_weights(path), golden_.config_path};
  EXPECT_EQ(checkpoint.weights->find("model.layers.0.mlp.experts.gate_up_proj")->shape, (Shape{6, 64, 32}));
  EXPECT_EQ(checkpoint.weights->find("model.layers.0.mlp.experts.0.gate_proj.weight"), nullptr);
  EXPECT_EQ(logits_of(checkpoint), logits_of(golden_));
}

// Matrices with scales for groups are kept so when experts are stacked, and come out of the stack as they were.
TEST(StackedExperts, EncodingsOfMatricesStay) {
  const GroupEncoding& encoding = *GroupEncoding::find("int4_g32_f16");
  std::vector<Tensor> experts;
  for (int e = 0; e < 3; ++e) {
    Tensor values = Tensor::on_host(DType::f32, Shape{5, 64});
    for (int i = 0; i < 5 * 64; ++i) values.view.as<float>()[i] = static_cast<float>((i * 7 + e * 13) % 31 - 15);
    experts.push_back(Tensor::on_host(DType::f16, Shape{5, 64}, encoding));
    encoding.encode(experts.back().view, values.view);
  }
  const auto read = [&](const std::string& name) { return experts[static_cast<size_t>(name[0] - '0')]; };
  const WeightRecipe stack =
      WeightRecipe::stack({WeightRecipe::name("0"), WeightRecipe::name("1"), WeightRecipe::name("2")});
  const Tensor stacked = evaluate(stack, read, "test");
  EXPECT_EQ(stacked.view.encoding, StackedEncoding::of_matrices(encoding));
  EXPECT_EQ(stacked.shape(), (Shape{3, 5, 64}));
  const NamedRecipe parameter{"p", stack};
  for (const auto& [name, recipe] : invert(std::span(&parameter, 1))) {
    const Tensor back = evaluate(
        recipe, [&](const std::string&) { return stacked; }, "test");
    EXPECT_EQ(back.view.encoding, &encoding);
    EXPECT_EQ(std::memcmp(values_in_f32(back.view).view.data, values_in_f32(read(name).view).view.data,
                          5 * 64 * sizeof(float)),
              0);
  }
  // Rows of the stack and parts of it are those of its matrices.
  const Tensor all = values_in_f32(stacked.view);
  EXPECT_EQ(
      std::memcmp(all.view.as<float>() + 2 * 5 * 64, values_in_f32(experts[2].view).view.data, 5 * 64 * sizeof(float)),
      0);
  for (int axis : {0, 1, 2}) {
    Shape shape = stacked.shape();
    shape[axis] = axis == 2 ? 32 : 2;
    const int64_t begin = axis == 2 ? 32 : 1;
    const Tensor part = Tensor::in_one_piece(DType::f16, shape, *stacked.view.encoding);
    stacked.view.encoding->slice(part.view, stacked.view, axis, begin);
    const Tensor values = values_in_f32(part.view);
    for (int64_t e = 0; e < shape[0]; ++e)
      for (int64_t r = 0; r < shape[1]; ++r)
        for (int64_t k = 0; k < shape[2]; ++k) {
          const int64_t from =
              ((e + (axis == 0 ? begin : 0)) * 5 + r + (axis == 1 ? begin : 0)) * 64 + k + (axis == 2 ? begin : 0);
          EXPECT_EQ(values.view.as<float>()[(e * shape[1] + r) * shape[2] + k], all.view.as<float>()[from]);
        }
  }
}

}  // namespace qwen3_moe_test
}  // namespace eadem::models
