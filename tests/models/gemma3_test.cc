// SPDX-License-Identifier: Apache-2.0
//
// Gemma 3: what its configurations mean, and its GGUF files. Its logits are compared in tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace gemma3_test {

namespace fs = std::filesystem;
using io::GgufValue;
using test::refusal;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "gemma3_text").set("vocab_size", 64).set("hidden_size", 32).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 8).set("num_attention_heads", 4).set("num_key_value_heads", 2);
}

TEST(Gemma3, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = parse(small());
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.max_position_embeddings, 131072);
  EXPECT_EQ(config.query_pre_attn_scalar, 256);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.local_rope_theta, 1e4);
  EXPECT_EQ(config.hidden_act, kernels::ActivationKind::gelu_tanh);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_EQ(config.layer_windows, (std::vector<int64_t>{4096, 4096, 4096, 4096, 4096, 0, 4096, 4096}));
}

TEST(Gemma3, OldAndNewKeysMeanTheSame) {
  for (const char* name : {"gemma3", "gemma3_mixed"}) {
    const auto read = [&](const char* file) {
      return ModelConfig::from_json(io::JsonReader::read((kGoldens / name / file).string()));
    };
    const ModelConfig config = read("config.json");
    EXPECT_EQ(io::to_json(config.describe()), io::to_json(read("config.classic.json").describe())) << name;
    EXPECT_EQ(parse(config.to_json()), config) << name;
  }
  const ModelConfig mixed =
      ModelConfig::from_json(io::JsonReader::read((kGoldens / "gemma3_mixed/config.json").string()));
  EXPECT_EQ(mixed.layer_windows, (std::vector<int64_t>{0, 12, 0}));
  EXPECT_EQ(mixed.rope_theta, 2000);
  EXPECT_EQ(mixed.local_rope_theta, 50);
  EXPECT_EQ(mixed.rope_scaling.kind, modules::RopeScaling::Kind::linear);
}

TEST(Gemma3, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* key, const io::JsonValue& value) {
    return refusal([&] { parse(small().set(key, value)); });
  };
  EXPECT_HAS(refused("final_logit_softcapping", -1.0), "final_logit_softcapping");
  EXPECT_HAS(refused("attn_logit_softcapping", 50.0), "'attn_logit_softcapping' is 50; only null is honoured");
  EXPECT_HAS(refused("use_bidirectional_attention", true), "only causal attention is honoured");
  EXPECT_EQ(parse(small().set("partial_rotary_factor", 0.5)).rotary_dim, 256) << "passed over, as in transformers";
}

// rope_parameters have an object for each kind of layers, with a scaling of its own.
TEST(Gemma3, BothKindsOfLayersMayHaveAScaling) {
  using Kind = modules::RopeScaling::Kind;
  const auto rope = [](const char* full, const char* sliding) {
    return small().set("rope_parameters", io::JsonValue::object()
                                              .set("full_attention", io::parse_json(full, "full"))
                                              .set("sliding_attention", io::parse_json(sliding, "sliding")));
  };
  const char *kPlain = R"({"rope_type": "default"})", *kLinear = R"({"rope_type": "linear", "factor": 2.0})";
  const ModelConfig one = parse(rope(kPlain, R"({"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0})"));
  EXPECT_EQ(one.rope_scaling.kind, Kind::none);
  EXPECT_EQ(one.rope_theta, 1e6);
  EXPECT_EQ(one.local_rope_scaling.kind, Kind::linear);
  EXPECT_EQ(one.local_rope_scaling.factor, 4);
  EXPECT_EQ(one.local_rope_theta, 7);
  EXPECT_EQ(parse(one.to_json()), one);
  const ModelConfig both = parse(rope(kLinear, R"({"rope_type": "yarn", "factor": 8.0})"));
  EXPECT_EQ(both.rope_scaling.factor, 2);
  EXPECT_EQ(both.local_rope_scaling.kind, Kind::yarn);
  EXPECT_EQ(both.local_rope_theta, 1e4);
  EXPECT_EQ(parse(both.to_json()), both);
  EXPECT_HAS(refusal([&] { both.to_gguf(); }), "rope scaling of layers with a window");

  const char* kLonger = R"({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [2.0]})";
  io::JsonValue two = rope(kPlain, kLonger);
  two.set("head_dim", 2);
  EXPECT_HAS(refusal([&] { parse(two); }), "\"longrope\"; known there are default, linear, dynamic, llama3, yarn");
  const char* kUntruncated = R"({"rope_type": "yarn", "factor": 2.0, "truncate": false})";
  EXPECT_HAS(refusal([&] { parse(rope(kPlain, kUntruncated)); }), "'truncate' of rope scaling is false");
  EXPECT_HAS(refusal([&] { parse(rope(kUntruncated, kPlain)); }), "'truncate' of rope scaling is false");
  EXPECT_HAS(refusal([&] { parse(rope(kPlain, R"({"rope_type": "linear", "factor": 0.5})")); }), "factor");
  EXPECT_HAS(
      refusal([&] {
        parse(rope(kLinear, kPlain).set("rope_scaling", io::parse_json(R"({"type": "linear", "factor": 3.0})", "")));
      }),
      "'rope_parameters' and 'rope_scaling' disagree");
}

// Two tables of frequencies, sandwiches of norms, one scale.
TEST(Gemma3, LayersAreWhatTheSpecSays) {
  const Decoder model(ModelConfig::from_json(io::JsonReader::read((kGoldens / "gemma3/config.json").string())));
  const DecoderSpec& spec = model.decoder_spec();
  EXPECT_DOUBLE_EQ(spec.embedding_scale * spec.embedding_scale, 24);
  const auto attention = [&](size_t layer) {
    return std::get<modules::CausalAttention::Config>(spec.layers[layer].mixer);
  };
  EXPECT_EQ(attention(0).rope.theta, 10000);
  EXPECT_EQ(attention(5).rope.theta, 1000);
  EXPECT_EQ(attention(5).window, 0);
  EXPECT_NE(attention(0).rope.name, attention(5).rope.name);
  EXPECT_EQ(spec.layers[0].after_mlp->name, "post_feedforward_layernorm");
  EXPECT_EQ(parameters_of(spec).size(), 2 + 7 * 13u);
}

class Gemma3Gguf : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_gemma_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    golden_ = open_checkpoint((kGoldens / "gemma3").string());
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

  static std::vector<float> logits_of(const Checkpoint& checkpoint) {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.max_logit_rows = options.max_num_batched_tokens = 64;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    engine::InferEngine::Input input;
    for (int32_t i = 0; i < 30; ++i) input.input_ids.push_back(3 + 5 * i % 90);
    input.input_lengths = {30};
    input.cache_lengths = {0};
    input.all_logits = true;
    engine->forward(input);
    const Tensor logits = engine->logits();
    return {logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements()};
  }

  fs::path folder_;
  Checkpoint golden_;
};

// Names, keys and sums as llama.cpp's conversion/gemma.py writes them.
TEST_F(Gemma3Gguf, HasTheBitsOfTheDirectory) {
  const std::string path = write(golden_.model->config()->to_gguf());
  const auto file = io::GgufFile::open(path);
  EXPECT_EQ(file->string("general.architecture"), "gemma3");
  EXPECT_EQ(file->integer("gemma3.attention.sliding_window", 0, 100), 8);
  EXPECT_EQ(file->number("gemma3.rope.freq_base"), 1000);
  EXPECT_EQ(file->find("output.weight"), nullptr);
  for (const char* name : {"blk.6.attn_norm.weight", "blk.6.post_attention_norm.weight", "blk.6.ffn_norm.weight",
                           "blk.6.post_ffw_norm.weight", "blk.6.attn_q_norm.weight", "output_norm.weight"})
    EXPECT_NE(file->find(name), nullptr) << name;
  const Tensor stored = file->get("blk.0.post_ffw_norm.weight"),
               w = golden_.weights->get("model.layers.0.post_feedforward_layernorm.weight");
  for (int64_t i = 0; i < w.view.num_elements(); ++i)
    EXPECT_EQ(stored.view.as<float>()[i], 1.0f + w.view.as<float>()[i]);

  const Checkpoint gguf = open_checkpoint(path);
  ModelConfig config = *gguf.model->config(), expected = *golden_.model->config();
  EXPECT_EQ(config.layer_windows, expected.layer_windows);
  EXPECT_EQ(config.local_rope_theta, expected.local_rope_theta);
  EXPECT_EQ(config.query_pre_attn_scalar, expected.query_pre_attn_scalar);
  EXPECT_EQ(config.hidden_act, expected.hidden_act);
  EXPECT_EQ(logits_of(gguf), logits_of(golden_));

  // And back. w is what was there, up to the rounding of 1 + w.
  const Checkpoint back = huggingface_form(gguf);
  EXPECT_EQ(back.weights->tensors().size(), golden_.weights->tensors().size());
  EXPECT_EQ(logits_of(back), logits_of(golden_));
  for (const io::WeightInfo& info : golden_.weights->tensors()) {
    const Tensor a = golden_.weights->get(info.name), b = back.weights->get(info.name);
    ASSERT_EQ(a.shape(), b.shape());
    for (int64_t i = 0; i < a.view.num_elements(); ++i)
      EXPECT_NEAR(a.view.as<float>()[i], b.view.as<float>()[i], info.name.ends_with("norm.weight") ? 0x1p-23 : 0);
  }
}

// Keys that newer files state, and what older ones leave to the program.
TEST_F(Gemma3Gguf, KeysOfFiles) {
  io::GgufMetadata metadata = golden_.model->config()->to_gguf();
  std::erase_if(metadata, [](const auto& entry) {
    return entry.first == "gemma3.rope.freq_base" || entry.first == "gemma3.rope.dimension_count";
  });
  EXPECT_EQ(open_checkpoint(write(metadata)).model->config()->rope_theta, 1e6);
  metadata.emplace_back("gemma3.rope.freq_base_swa", GgufValue::scalar(500.0f));
  metadata.emplace_back("gemma3.attention.sliding_window_pattern", GgufValue::scalar(uint32_t{2}));
  const ModelConfig config = *open_checkpoint(write(metadata)).model->config();
  EXPECT_EQ(config.local_rope_theta, 500);
  EXPECT_EQ(config.layer_windows, (std::vector<int64_t>{8, 0, 8, 0, 8, 0, 8}));
  metadata.emplace_back("gemma3.final_logit_softcapping", GgufValue::scalar(30.0f));
  EXPECT_HAS(refusal([&] { open_checkpoint(write(metadata)); }), "'gemma3.final_logit_softcapping' is not 0");
}

// A file does not state the activation; a function with two names gets that of the family's configs.
TEST_F(Gemma3Gguf, TheActivationHasItsUsualName) {
  const io::JsonValue json = open_checkpoint(write(golden_.model->config()->to_gguf())).model->config()->to_json();
  EXPECT_EQ(json.find("hidden_activation")->as_string(), "gelu_pytorch_tanh");
}

TEST_F(Gemma3Gguf, WhatTheArchitectureCannotStateIsRefused) {
  const auto refused = [&](auto&& change) {
    ModelConfig config = *golden_.model->config();
    change(config);
    return refusal([&] { config.to_gguf(); });
  };
  EXPECT_EQ(refused([](ModelConfig&) {}), "");
  EXPECT_HAS(refused([](ModelConfig& c) { c.query_pre_attn_scalar = 20; }),
             "Unsupported: query_pre_attn_scalar is 20; GGUF's gemma3 architecture implies 16");
  EXPECT_HAS(refused([](ModelConfig& c) { c.layer_windows = {0, 8, 0, 0, 8, 8, 8}; }), "follow no pattern");
  EXPECT_HAS(refused([](ModelConfig& c) { c.layer_windows.assign(7, 0); }), "no layer has an attention window");
  EXPECT_HAS(refused([](ModelConfig& c) { c.hidden_act = kernels::ActivationKind::silu; }), "gelu_pytorch_tanh");
}

}  // namespace gemma3_test
}  // namespace eadem::models
