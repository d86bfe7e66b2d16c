// SPDX-License-Identifier: Apache-2.0
//
// Gemma 4: what its configurations mean, and which layers keep keys. Its logits are compared in
// tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <filesystem>

#include "eadem/models/decoder.h"
#include "eadem/models/graphs.h"
#include "eadem/models/huggingface.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace gemma4_test {

namespace fs = std::filesystem;
using modules::CausalAttention;

ModelConfig gemma4_config(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small_gemma4() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "gemma4_text").set("vocab_size", 64).set("hidden_size", 32).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 7).set("num_attention_heads", 8);
}

const CausalAttention::Config& attention_of(const Decoder& model, size_t layer) {
  return std::get<CausalAttention::Config>(model.decoder_spec().layers[layer].mixer);
}

TEST(Gemma4, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = gemma4_config(small_gemma4());
  EXPECT_EQ(config.layer_windows, (std::vector<int64_t>{512, 512, 512, 512, 512, 0, 0})) << "the last one has none";
  EXPECT_EQ(config.hidden_size_per_layer_input, 256);
  EXPECT_EQ(config.vocab_size_per_layer_input, 262144);
  EXPECT_TRUE(config.tie_word_embeddings);
  const Decoder model(config);
  const CausalAttention::Config &windowed = attention_of(model, 0), &full = attention_of(model, 5);
  EXPECT_EQ(windowed.head_dim, 256);
  EXPECT_EQ(full.head_dim, 512);
  EXPECT_EQ(full.kv_heads, 4);
  EXPECT_EQ(windowed.rope.theta, 10000);
  const std::vector<double> frequencies = modules::rope_frequencies(full.rope).inv_freq;
  EXPECT_EQ(frequencies.size(), 256u);
  EXPECT_GT(frequencies[63], 0);
  EXPECT_EQ(frequencies[64], 0) << "a quarter of the pairs rotates";
}

// Published files name the heads of layers without a window; transformers writes them layer by layer.
TEST(Gemma4, HeadsOfFullLayersHaveTwoSpellings) {
  io::JsonValue published = small_gemma4(), written = small_gemma4();
  published.set("attention_k_eq_v", true).set("global_head_dim", 64).set("num_global_key_value_heads", 2);
  io::JsonValue layers = io::JsonValue::object();
  for (const char* layer : {"5", "6"})
    layers.set(layer, io::JsonValue::object().set("head_dim", 64).set("num_key_value_heads", 2));
  written.set("attention_k_eq_v", true).set("per_layer_config", layers);
  EXPECT_EQ(gemma4_config(published), gemma4_config(written));
  EXPECT_EQ(gemma4_config(gemma4_config(written).to_json()), gemma4_config(written));
  layers.set("2", io::JsonValue::object().set("head_dim", 64));
  written.set("per_layer_config", layers);
  EXPECT_HAS(test::refusal([&] { gemma4_config(written); }), "'per_layer_config' gives layer 2");
}

TEST(Gemma4, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* key, const io::JsonValue& value) {
    return test::refusal([&] { gemma4_config(small_gemma4().set(key, value)); });
  };
  EXPECT_HAS(refused("enable_moe_block", true), "'enable_moe_block' is true");
  EXPECT_HAS(refused("use_bidirectional_attention", "all"), "causally");
  EXPECT_EQ(refused("use_bidirectional_attention", "vision"), "");
  EXPECT_HAS(refused("vocab_size_per_layer_input", 63), "below the vocabulary of 64");
  EXPECT_HAS(test::refusal([] { Decoder(gemma4_config(small_gemma4().set("num_kv_shared_layers", 2))); }),
             "shares the keys of no earlier layer of its kind");
}

// Layers 3 and 4 read the caches of layers 2 and 1.
TEST(Gemma4, LayersThatShareKeysKeepNone) {
  const fs::path folder = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/gemma4";
  const Checkpoint checkpoint = open_checkpoint(folder.string());
  const auto& model = dynamic_cast<const Decoder&>(*checkpoint.model);
  EXPECT_EQ(attention_of(model, 3).keys_of, 2);
  EXPECT_EQ(attention_of(model, 4).keys_of, 1);
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const auto hardware =
      modules::AutoHardwareConfig::from_model_spec(spec_of(checkpoint), *device, HardwareMode::performance, {}, "test");
  std::vector<std::string> names;
  for (const modules::StateSpec& state : states_of(model, *device, hardware)) names.push_back(state.name);
  std::vector<std::string> expected;
  for (const char* layer : {"0", "1", "2"})
    for (const char* kind : {"k", "v"})
      expected.push_back(fmt::format("model.layers.{}.self_attn.{}_cache", layer, kind));
  EXPECT_EQ(names, expected);
  for (const ParameterInfo& parameter : model.parameters())
    EXPECT_FALSE(parameter.name.starts_with("model.layers.3.self_attn.k")) << parameter.name;
}

}  // namespace gemma4_test
}  // namespace eadem::models
