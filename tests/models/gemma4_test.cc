// SPDX-License-Identifier: Apache-2.0
//
// Gemma 4: what its configurations mean, layers that keep no keys and values, and its GGUF files. Its logits are
// compared in tests/engine/golden_test.cc, its gradients in families_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/graphs.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace gemma4_test {

namespace fs = std::filesystem;
using io::GgufValue;
using test::refusal;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "gemma4_text").set("vocab_size", 64).set("hidden_size", 32).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 8).set("num_attention_heads", 4).set("num_key_value_heads", 2);
}

io::JsonValue golden_json(const char* name) {
  const std::string file = (kGoldens / name / "config.json").string();
  return io::parse_json(io::to_json(io::JsonReader::read(file).value()), file);
}

const modules::CausalAttention::Config& attention_of(const DecoderSpec& spec, size_t layer) {
  return std::get<modules::CausalAttention::Config>(spec.layers[layer].mixer);
}

TEST(Gemma4, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = parse(small());
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.global_head_dim, 512);
  EXPECT_EQ(config.num_global_key_value_heads, 2);
  EXPECT_EQ(config.max_position_embeddings, 131072);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.local_rope_theta, 1e4);
  EXPECT_EQ(config.rotated_pairs, 64);
  EXPECT_EQ(config.layer_input_size, 256);
  EXPECT_EQ(config.layer_input_vocab, 262144);
  EXPECT_EQ(config.logit_softcap, 0);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.layer_windows, (std::vector<int64_t>{512, 512, 512, 512, 512, 0, 512, 0}));  // the last one is full
  EXPECT_EQ(parse(config.to_json()), config);
}

TEST(Gemma4, LayersOfFullAttentionHaveHeadsOfTheirOwn) {
  const Decoder model(parse(golden_json("gemma4_equal")));
  const DecoderSpec& spec = model.decoder_spec();
  const auto &sliding = attention_of(spec, 2), &full = attention_of(spec, 3);
  EXPECT_EQ(sliding.head_dim, 6);
  EXPECT_EQ(sliding.kv_heads, 2);
  EXPECT_FALSE(sliding.keys_are_values);
  EXPECT_EQ(full.head_dim, 16);
  EXPECT_EQ(full.kv_heads, 1);
  EXPECT_TRUE(full.keys_are_values);
  const std::vector<double> frequencies = modules::rope_frequencies(full.rope).inv_freq;
  ASSERT_EQ(frequencies.size(), 8u);
  EXPECT_DOUBLE_EQ(frequencies[2], std::pow(1000.0, -4.0 / 16));  // of all dimensions, not of those that rotate
  EXPECT_EQ(std::count(frequencies.begin(), frequencies.end(), 0.0), 5);
}

// What num_global_key_value_heads says counts only where keys are values; per_layer_config decides where it is there.
TEST(Gemma4, HeadsOfFullLayersInEitherSpelling) {
  const auto heads = [](const io::JsonValue& json) {
    const ModelConfig config = parse(json);
    EXPECT_EQ(parse(config.to_json()), config);
    return std::pair(config.global_head_dim, config.num_global_key_value_heads);
  };
  io::JsonValue json = small();
  json.set("global_head_dim", 20).set("num_global_key_value_heads", 1);
  EXPECT_EQ(heads(json), std::pair(int64_t{20}, int64_t{2}));
  json.set("attention_k_eq_v", true);
  EXPECT_EQ(heads(json), std::pair(int64_t{20}, int64_t{1}));
  const auto layers = [](std::initializer_list<const char*> names, int64_t dim) {
    io::JsonValue object = io::JsonValue::object();
    for (const char* name : names)
      object.set(name, io::JsonValue::object().set("head_dim", dim).set("num_key_value_heads", 4));
    return object;
  };
  json.set("per_layer_config", layers({"5", "7"}, 24));
  EXPECT_EQ(heads(json), std::pair(int64_t{24}, int64_t{4}));
  EXPECT_HAS(refusal([&] { parse(json.set("per_layer_config", layers({"7"}, 24))); }),
             "gives layer 5 2 key-value heads of 256, and other layers of its type 4 of 24");
  EXPECT_HAS(refusal([&] { parse(json.set("per_layer_config", layers({"8"}, 24))); }), "a number of the 8 layers");
}

TEST(Gemma4, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* key, const io::JsonValue& value) {
    return refusal([&] { parse(small().set(key, value)); });
  };
  EXPECT_EQ(refused("use_bidirectional_attention", "vision"), "");
  EXPECT_HAS(refused("use_bidirectional_attention", "all"), "'use_bidirectional_attention' is \"all\"");
  EXPECT_HAS(refused("num_kv_shared_layers", 8), "8 of 8 layers share keys and values");
  EXPECT_HAS(refused("num_kv_shared_layers", 4), "layer 5 shares keys and values, and none of the first 4 layers");
  EXPECT_HAS(refused("vocab_size_per_layer_input", 60), "inputs of layers are there for 60 of 64 tokens");
  EXPECT_HAS(refused("enable_moe_block", true), "num_experts");
  EXPECT_EQ(refused("num_experts", 4), "");  // switched off
  const auto rope = [&](const char* type, double share) {
    io::JsonValue full = io::JsonValue::object(), both = io::JsonValue::object();
    full.set("rope_type", type).set("rope_theta", 1e6).set("partial_rotary_factor", share).set("factor", 2.0);
    return refused("rope_parameters", both.set("full_attention", std::move(full)));
  };
  EXPECT_EQ(rope("proportional", 0.5), "");
  EXPECT_HAS(rope("linear", 1), "rope of type \"linear\" in layers of full attention");
  EXPECT_HAS(rope("proportional", 0.001), "no pair of the 512 dimensions");
}

TEST(Gemma4, GgufFilesCannotStateEverything) {
  const auto refused = [](io::JsonValue json) { return refusal([&] { parse(json).to_gguf(); }); };
  EXPECT_EQ(refused(golden_json("gemma4")), "");
  EXPECT_HAS(refused(golden_json("gemma4").set("attention_bias", true)), "biases of attention, which GGUF's gemma4");
  io::JsonValue scaled = golden_json("gemma4"), full = io::JsonValue::object();
  full.set("rope_type", "proportional").set("rope_theta", 1e6).set("factor", 4.0);
  scaled.set("rope_parameters", io::JsonValue::object().set("full_attention", std::move(full)));
  EXPECT_HAS(refused(std::move(scaled)), "a factor 4 of rope, which GGUF's gemma4");
  EXPECT_HAS(refused(golden_json("gemma4").set("hidden_activation", "silu")), "hidden_activation is not gelu");
}

class SharedKv : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_gemma_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    golden_ = open_checkpoint((kGoldens / "gemma4").string());
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The golden with further tensors, of some numbers.
  Checkpoint with(std::initializer_list<const char*> names) const {
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const io::WeightInfo& info : golden_.weights->tensors()) {
      kept.push_back(golden_.weights->get(info.name));
      tensors.push_back({info.name, kept.back().view});
    }
    for (const char* name : names) {
      kept.push_back(Tensor::on_host(DType::f32, Shape{3}));
      std::fill_n(kept.back().view.as<float>(), 3, 1.5f);
      tensors.push_back({name, kept.back().view});
    }
    io::write_safetensors((folder_ / "model.safetensors").string(), tensors, {});
    fs::copy_file(kGoldens / "gemma4/config.json", folder_ / "config.json", fs::copy_options::overwrite_existing);
    return open_checkpoint(folder_.string());
  }

  static std::unique_ptr<engine::InferEngine> engine_of(const Checkpoint& checkpoint) {
    return engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), {});
  }

  fs::path folder_;
  Checkpoint golden_;
};

// Layers 4 and 5 of six read the caches of layers 3 and 2.
TEST_F(SharedKv, TheLastLayersKeepNothing) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware =
      modules::AutoHardwareConfig::from_model_spec(golden_.model->spec(), *device, HardwareMode::accuracy);
  std::vector<std::string> names, expected;
  int64_t values = 0;  // of a token
  for (const modules::StateSpec& state : states_of(*golden_.model, *device, hardware)) {
    names.push_back(state.name);
    values += state.row.bind({}).num_elements();
    EXPECT_EQ(state.window, state.name.find("layers.2.") == std::string::npos ? 8 : 0) << state.name;
  }
  for (int layer : {0, 1, 2, 3})
    for (const char* cache : {"k_cache", "v_cache"})
      expected.push_back(fmt::format("model.layers.{}.self_attn.{}", layer, cache));
  EXPECT_EQ(names, expected);
  EXPECT_EQ(values, 2 * (3 * 10 + 14));

  ModelConfig own = *golden_.model->config();
  own.num_kv_shared_layers = 0;
  EXPECT_EQ(states_of(Decoder(own), *device, hardware).size(), 12u);
}

TEST_F(SharedKv, TensorsThatNobodyReadsAreTolerated) {
  const Checkpoint more = with({"model.layers.4.self_attn.k_proj.weight", "model.layers.5.self_attn.v_proj.weight",
                                "model.layers.5.self_attn.k_norm.weight"});
  EXPECT_EQ(refusal([&] { engine_of(more); }), "");
  EXPECT_TRUE(golden_.model->may_ignore("blk.4.attn_k.weight"));
  EXPECT_TRUE(golden_.model->may_ignore("blk.5.attn_k_norm.weight"));
  for (const char* name : {"model.layers.4.self_attn.q_proj.bias", "model.layers.3.self_attn.k_proj.bias",
                           "model.layers.6.self_attn.k_proj.weight"})
    EXPECT_HAS(refusal([&] { engine_of(with({name})); }), name);
  EXPECT_FALSE(golden_.model->may_ignore("blk.3.attn_k.weight"));
  EXPECT_FALSE(golden_.model->may_ignore("blk.5.attn_q.weight"));
  EXPECT_FALSE(golden_.model->may_ignore("blk.5.ffn_up.weight"));
}

// A part of the model that lacks what its layers read says so.
TEST_F(SharedKv, PartsOfTheModelNeedWhatTheyRead) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware =
      modules::AutoHardwareConfig::from_model_spec(golden_.model->spec(), *device, HardwareMode::accuracy);
  const auto built = [&](const Model& model, int layer) {
    pipeline::Graph graph;
    BuildContext context{.graph = graph, .device = *device, .hardware = hardware, .cache = {}};
    const auto input = [&](const char* name, const TensorType& type) { return graph.add_input(name, type); };
    context.step.token_ids = input("token_ids", TensorType(DType::i32, {Symbol::tokens}));
    context.step.positions = input("positions", TensorType(DType::i32, {Symbol::tokens}));
    context.step.query_start = input("query_start", TensorType(DType::i32, {Dim(Symbol::sequences, 1)}));
    context.step.kv_length = input("kv_length", TensorType(DType::i32, {Symbol::sequences}));
    const ValueId x = input("hidden", TensorType(DType::f32, {Symbol::tokens, model.info().hidden}));
    return refusal([&] { model.layer(context, layer, x); });
  };
  EXPECT_EQ(built(*golden_.model, 0), "");  // x are the embeddings
  EXPECT_HAS(built(*golden_.model, 1), "layer 1 reads inputs that the embedding makes");
  ModelConfig without = *golden_.model->config();
  without.layer_input_size = 0;
  EXPECT_EQ(built(Decoder(without), 3), "");
  EXPECT_HAS(built(Decoder(without), 4), "layer 4 reads the keys and values of layer 3, which is not in the same part");
}

class Gemma4Gguf : public SharedKv {
 protected:
  std::string write(const io::GgufMetadata& metadata, const std::vector<double>& divisors) const {
    const ParameterReader reader(golden_);
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const auto& [name, recipe] : tensors_of(*golden_.model, CheckpointFormat::gguf)) {
      kept.push_back(evaluate(
          recipe, [&](const std::string& own) { return reader.read(own); }, name));
      tensors.push_back({name, kept.back().view});
    }
    kept.push_back(Tensor::on_host(DType::f32, Shape{static_cast<int64_t>(divisors.size())}));
    std::transform(divisors.begin(), divisors.end(), kept.back().view.as<float>(),
                   [](double divisor) { return static_cast<float>(divisor); });
    tensors.push_back({"rope_freqs.weight", kept.back().view});
    std::string path = (folder_ / "model.gguf").string();
    io::write_gguf(path, metadata, tensors);
    return path;
  }

  // The golden's keys, one of them with another value.
  static io::GgufMetadata changed(const ModelConfig& config, const std::string& key, GgufValue value) {
    io::GgufMetadata metadata = config.to_gguf();
    for (auto& [name, own] : metadata)
      if (name == "gemma4." + key) own = std::move(value);
    return metadata;
  }
};

TEST_F(Gemma4Gguf, StatesWhatTheConfigurationSays) {
  const ModelConfig& config = *golden_.model->config();
  const std::string path = write(config.to_gguf(), gguf_divisors(config));
  const auto file = io::GgufFile::open(path);
  EXPECT_EQ(file->integer("gemma4.attention.key_length", 0, 100), 14);
  EXPECT_EQ(file->integer("gemma4.attention.key_length_swa", 0, 100), 10);
  EXPECT_EQ(file->integer("gemma4.attention.shared_kv_layers", 0, 100), 2);
  EXPECT_EQ(file->integers("gemma4.feed_forward_length", 0, 100), (std::vector<int64_t>{12, 12, 12, 12, 24, 24}));
  ModelConfig read = ModelConfig::from_gguf(*file);
  read.rms_norm_eps = config.rms_norm_eps;  // through f32
  read.checkpoint_dtype = config.checkpoint_dtype;
  read.bos_token_id = config.bos_token_id, read.eos_token_id = config.eos_token_id;  // the tokenizer's
  EXPECT_EQ(read, config);
}

TEST_F(Gemma4Gguf, WhatIsNotComputedIsRefused) {
  const ModelConfig& config = *golden_.model->config();
  const std::vector<double> divisors = gguf_divisors(config);
  const auto refused = [&](const char* key, GgufValue value) {
    return refusal([&] { ModelConfig::from_gguf(*io::GgufFile::open(write(changed(config, key, value), divisors))); });
  };
  const auto list = [](std::vector<uint32_t> numbers) {
    return GgufValue::scalars(std::span<const uint32_t>(numbers));
  };
  EXPECT_HAS(refused("feed_forward_length", list({12, 12, 12, 16, 24, 24})), "is 16 in layer 3; expected 12");
  EXPECT_HAS(refused("feed_forward_length", list({12, 12})), "has 2 entries for 6 layers");
  EXPECT_HAS(refused("attention.head_count_kv", list({1, 2, 1, 1, 1, 1})), "is 2 in layer 1; expected 1");
  EXPECT_HAS(refused("attention.head_count_kv", list({0, 1, 1, 1, 1, 1})), "expected an integer in [1");
  EXPECT_HAS(refused("attention.sliding_window_pattern", list({1, 1, 1, 1, 1, 1})), "the last layer has a window");
  EXPECT_HAS(refused("attention.value_length_swa", GgufValue::scalar(uint32_t{8})), "is 8 but keys have 10");
  EXPECT_HAS(refused("rope.dimension_count", GgufValue::scalar(uint32_t{4})), "'gemma4.rope.dimension_count' is 4");
  EXPECT_HAS(refusal([&] {
               ModelConfig::from_gguf(*io::GgufFile::open(write(config.to_gguf(), {1, 2, 4, 8, 16, 32, 64})));
             }),
             "'rope_freqs.weight' is not 7 divisors");
}

}  // namespace gemma4_test
}  // namespace eadem::models
