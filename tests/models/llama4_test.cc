// SPDX-License-Identifier: Apache-2.0
//
// What the configurations of Llama 4 mean, in config.json and in GGUF files. Logits are compared in
// tests/engine/golden_test.cc, and training in tests/models/families_test.cc.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>

#include "eadem/io/gguf.h"
#include "eadem/models/decoders/decoder.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace llama4_test {

namespace fs = std::filesystem;
using io::GgufValue;
using kernels::RouteAttrs;
using test::refusal;

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "llama4_text").set("vocab_size", 64).set("hidden_size", 64).set("intermediate_size", 48);
  json.set("intermediate_size_mlp", 96).set("num_hidden_layers", 4);
  return json.set("num_attention_heads", 16).set("num_key_value_heads", 8);
}

std::string layers_of(const ModelConfig& config) {
  std::string text;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) text += config.has_experts(layer) ? 'e' : 'd';
  return text;
}

modules::MoeMlp::Config experts_of_last(const ModelConfig& config) {
  return std::get<modules::MoeMlp::Config>(Decoder(config).decoder_spec().layers.back().mlp);
}

modules::CausalAttention::Config attention_of(const ModelConfig& config, size_t layer) {
  return std::get<modules::CausalAttention::Config>(Decoder(config).decoder_spec().layers[layer].mixer);
}

TEST(Llama4, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = parse(small());
  EXPECT_EQ(layers_of(config), "eeee");
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_experts, 16);
  EXPECT_EQ(config.rope_theta, 5e5);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.layer_chunks, (std::vector<int64_t>{8192, 8192, 8192, 0}));
  const modules::MoeMlp::Config experts = experts_of_last(config);
  EXPECT_TRUE(experts.weighs_input);
  EXPECT_EQ(experts.route.top_k, 1);
  EXPECT_EQ(experts.route.scoring, RouteAttrs::Scoring::sigmoid);
  EXPECT_FALSE(experts.route.renormalize);
  EXPECT_EQ(experts.ffn, 48);
  EXPECT_EQ(experts.shared->ffn, 48);
  EXPECT_FALSE(experts.shared->gated);
  const auto rotated = attention_of(config, 0), plain = attention_of(config, 3);
  EXPECT_EQ(rotated.chunk, 8192);
  EXPECT_EQ(rotated.rope.style, kernels::RopeStyle::interleaved);
  EXPECT_EQ(rotated.qk_norm, modules::CausalAttention::Config::QkNorm::weightless_after_rope);
  EXPECT_TRUE(rotated.qk_norm_eps.has_value());
  EXPECT_FALSE(rotated.temperature.has_value());
  EXPECT_EQ(plain.chunk, 0);
  EXPECT_EQ(plain.rope.rotary_dim, 0);
  EXPECT_FALSE(plain.qk_norm_eps.has_value());
  ASSERT_TRUE(plain.temperature.has_value());
  EXPECT_EQ(plain.temperature->length, 8192);
  EXPECT_FLOAT_EQ(plain.temperature->rate, 0.1f);
  EXPECT_TRUE(plain.temperature->plus_one);
  EXPECT_EQ(parse(config.to_json()), config);
}

// The keys of published files: numbers for truths, factors of the scaling that are one number, lists of layers.
TEST(Llama4, SpellingsOfConfigs) {
  const auto list = [](std::initializer_list<int64_t> values) {
    io::JsonValue result = io::JsonValue::array();
    for (int64_t value : values) result.push_back(value);
    return result;
  };
  const ModelConfig usual = parse(small());
  EXPECT_EQ(parse(small().set("attn_temperature_tuning", 4)), usual);
  EXPECT_EQ(parse(small().set("no_rope_layers", list({})).set("moe_layers", nullptr)), usual);
  EXPECT_EQ(parse(small().set("no_rope_layers", list({1, 1, 1, 0, 1, 1})).set("for_llm_compressor", false)), usual);
  EXPECT_EQ(layers_of(parse(small().set("interleave_moe_layer_step", 2))), "dede");
  EXPECT_EQ(layers_of(parse(small().set("interleave_moe_layer_step", 2).set("moe_layers", list({0, 3})))), "edde");
  EXPECT_EQ(parse(small().set("no_rope_layer_interval", 2)).nope_layers, (std::vector<int64_t>{1, 3}));
  EXPECT_FALSE(attention_of(parse(small().set("attn_temperature_tuning", 0)), 3).temperature.has_value());
  EXPECT_FALSE(attention_of(parse(small().set("use_qk_norm", false)), 0).qk_norm_eps.has_value());
  io::JsonValue types = io::JsonValue::array();
  for (const char* type : {"full_attention", "chunked_attention", "full_attention", "chunked_attention"})
    types.push_back(type);
  const ModelConfig mixed = parse(small().set("layer_types", types).set("attention_chunk_size", 50));
  EXPECT_EQ(mixed.layer_chunks, (std::vector<int64_t>{0, 50, 0, 50}));
  EXPECT_EQ(parse(mixed.to_json()), mixed);
  io::JsonValue scaling = io::JsonValue::object();
  scaling.set("rope_type", "llama3").set("factor", 16.0).set("low_freq_factor", 1.0).set("high_freq_factor", 1.0);
  scaling.set("original_max_position_embeddings", 8192);
  EXPECT_EQ(parse(small().set("rope_scaling", scaling)).rope_scaling.factor, 16);
  scaling.set("high_freq_factor", 0.5);
  EXPECT_HAS(refusal([&] { parse(small().set("rope_scaling", scaling)); }), "low_freq_factor 1");
  EXPECT_HAS(refusal([&] { parse(small().set("no_rope_layers", list({1, 0}))); }), "4 entries, one per layer");
  EXPECT_HAS(refusal([&] { parse(small().set("attention_chunk_size", nullptr)); }), "attention_chunk_size");
  EXPECT_HAS(refusal([&] { parse(small().set("floor_scale", 0.5)); }), "floor_scale");
  EXPECT_HAS(refusal([&] { parse(small().set("floor_scale", 8.5)); }), "'floor_scale'");
  EXPECT_HAS(refusal([&] { parse(small().set("intermediate_size_mlp", nullptr)); }), "'intermediate_size_mlp'");
}

// llama.cpp knows these numbers from the architecture alone.
TEST(Llama4, WhatGgufCannotStateIsRefused) {
  const auto gguf = [](const char* key, const io::JsonValue& value) {
    return refusal([&] { parse(small().set(key, value)).to_gguf(); });
  };
  io::JsonValue layers = io::JsonValue::array();
  EXPECT_EQ(gguf("interleave_moe_layer_step", 2), "");
  EXPECT_HAS(gguf("moe_layers", layers), "experts at no regular interval");
  EXPECT_HAS(gguf("moe_layers", layers.push_back(0).push_back(3)), "experts at no regular interval");
  EXPECT_HAS(gguf("attention_chunk_size", 64), "attention by chunks of 64");
  EXPECT_HAS(gguf("no_rope_layer_interval", 2), "other layers than every fourth rotate nothing");
  EXPECT_HAS(gguf("attn_scale", 0.2), "attn_scale 0.2 and floor_scale 8192");
  EXPECT_HAS(gguf("floor_scale", 100), "attn_scale 0.1 and floor_scale 100");
  EXPECT_HAS(gguf("attn_temperature_tuning", false), "attn_temperature_tuning false");
  EXPECT_HAS(gguf("attention_bias", true), "biases of attention");
  EXPECT_HAS(gguf("use_qk_norm", false), "use_qk_norm false with 16 experts");
  EXPECT_HAS(gguf("num_local_experts", 128), "use_qk_norm true with 128 experts");
  EXPECT_HAS(gguf("hidden_act", "gelu"), "is not silu");
  EXPECT_EQ(refusal([] { parse(small().set("use_qk_norm", false).set("num_local_experts", 128)).to_gguf(); }), "");
}

// Reads a file of these metadata, in which there are an embedding and a head alone.
ModelConfig read_gguf(const io::GgufMetadata& metadata) {
  std::string pattern = (fs::temp_directory_path() / "eadem_llama4_XXXXXX").string();
  EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
  const fs::path folder = pattern;
  const std::string file = (folder / "model.gguf").string();
  const Tensor matrix = Tensor::on_host(DType::f32, Shape{64, 64});
  std::memset(matrix.view.data, 0, static_cast<size_t>(matrix.view.size_bytes()));
  const std::vector<io::NamedTensor> tensors = {{"token_embd.weight", matrix.view}, {"output.weight", matrix.view}};
  io::write_gguf(file, metadata, tensors);
  const auto remove = [&](const fs::path* path) { fs::remove_all(*path); };
  const std::unique_ptr<const fs::path, decltype(remove)> removed(&folder, remove);
  return ModelConfig::from_gguf(*io::GgufFile::open(file));
}

// Other programs know chunks, layers without rotation, temperatures and norms from the architecture.
TEST(Llama4, GgufFilesStateWhatTheArchitectureLeavesOpen) {
  const auto exact = [] { return small().set("rms_norm_eps", 0x1p-17); };  // the same number in f32
  for (const int64_t step : {1, 2, 3}) {
    const ModelConfig stepped = parse(exact().set("interleave_moe_layer_step", step));
    EXPECT_EQ(read_gguf(stepped.to_gguf()), stepped) << step;
  }
  const ModelConfig config = parse(exact());
  const auto with = [&](const char* key, GgufValue value) {
    io::GgufMetadata metadata = config.to_gguf();
    metadata.emplace_back(key, std::move(value));
    return metadata;
  };
  EXPECT_EQ(read_gguf(with("llama4.attention.sliding_window", GgufValue::scalar(uint32_t{8192}))), config);
  EXPECT_EQ(read_gguf(with("llama4.expert_gating_func", GgufValue::scalar(uint32_t{2}))), config);
  for (const uint32_t window : {0u, 512u})
    EXPECT_HAS(refusal([&] { read_gguf(with("llama4.attention.sliding_window", GgufValue::scalar(window))); }),
               fmt::format("'llama4.attention.sliding_window' is {}; only 8192 is honoured", window));
  EXPECT_HAS(refusal([&] { read_gguf(with("llama4.expert_gating_func", GgufValue::scalar(uint32_t{1}))); }),
             "'llama4.expert_gating_func' is 1; only 2 is honoured");
  EXPECT_HAS(
      refusal([&] { read_gguf(with("llama4.attention.sliding_window_pattern", GgufValue::scalar(uint32_t{3}))); }),
      "'llama4.attention.sliding_window_pattern' is not honoured");
  io::GgufMetadata experts = parse(small().set("use_qk_norm", false).set("num_local_experts", 128)).to_gguf();
  EXPECT_FALSE(read_gguf(experts).qk_norm);
}

}  // namespace llama4_test
}  // namespace eadem::models
