// SPDX-License-Identifier: Apache-2.0
//
// The families with mixtures of experts, by one table: what their configurations mean, and that checkpoints of each are
// saved as they were read. Logits are compared in tests/engine/golden_test.cc, and training in
// tests/train/training_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace expert_families_test {

namespace fs = std::filesystem;
using kernels::RouteAttrs;
using test::refusal;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";

ModelConfig read_config(const std::string& name, const char* file) {
  return ModelConfig::from_json(io::JsonReader::read((kGoldens / name / file).string()));
}

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small(const char* type) {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", type).set("vocab_size", 64).set("hidden_size", 64).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 4).set("num_attention_heads", 16).set("num_key_value_heads", 8);
}

// The experts of the last layer.
modules::MoeMlp::Config experts_of_last(const ModelConfig& config) {
  return std::get<modules::MoeMlp::Config>(Decoder(config).decoder_spec().layers.back().mlp);
}

std::string layers_of(const ModelConfig& config) {
  std::string text;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) text += config.has_experts(layer) ? 'e' : 'd';
  return text;
}

class ExpertFamily : public testing::TestWithParam<const char*> {};

TEST_P(ExpertFamily, OldAndNewKeysMeanTheSame) {
  const ModelConfig config = read_config(GetParam(), "config.json");
  EXPECT_EQ(io::to_json(config.describe()), io::to_json(read_config(GetParam(), "config.classic.json").describe()));
  EXPECT_EQ(parse(config.to_json()), config);
}

// Every tensor of the file is made of parameters again, and nothing else is.
TEST_P(ExpertFamily, IsSavedAsItWasRead) {
  const Checkpoint golden = open_checkpoint((kGoldens / GetParam()).string());
  const ParameterReader reader(golden);
  size_t count = 0;
  for (const auto& [name, recipe] : tensors_of(*golden.model, CheckpointFormat::huggingface)) {
    ASSERT_NE(golden.weights->find(name), nullptr) << name;
    const Tensor read = golden.weights->get(name),
                 saved = evaluate(
                     recipe, [&](const std::string&own) { return reader.read(own); }, name);
    ASSERT_EQ(to_string(read.view), to_string(saved.view)) << name;
    EXPECT_EQ(std::memcmp(read.view.data, saved.view.data, static_cast<size_t>(read.view.size_bytes())), 0) << name;
    ++count;
  }
  EXPECT_EQ(count, golden.weights->tensors().size());
}

INSTANTIATE_TEST_SUITE_P(Goldens, ExpertFamily,
                         testing::Values("mixtral", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "gemma4_experts"));

TEST(ExpertFamilies, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig mixtral = parse(small("mixtral"));
  EXPECT_EQ(mixtral.num_experts, 8);
  EXPECT_EQ(mixtral.moe_intermediate_size, 48);
  EXPECT_EQ(mixtral.rope_theta, 1e6);
  EXPECT_EQ(mixtral.rms_norm_eps, 1e-5);
  EXPECT_TRUE(experts_of_last(mixtral).route.renormalize);

  const ModelConfig qwen2 = parse(small("qwen2_moe"));
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.attention_out_bias);
  EXPECT_EQ(qwen2.num_experts, 60);
  EXPECT_FALSE(experts_of_last(qwen2).route.renormalize);
  EXPECT_EQ(experts_of_last(qwen2).shared->ffn, 5632);
  EXPECT_TRUE(experts_of_last(qwen2).shared->gated);

  const ModelConfig glm4 = parse(small("glm4_moe"));
  EXPECT_EQ(layers_of(glm4), "deee");
  EXPECT_EQ(glm4.rotary_dim, glm4.head_dim / 2);
  EXPECT_FALSE(glm4.qk_norm);
  EXPECT_EQ(experts_of_last(glm4).route.scoring, RouteAttrs::Scoring::sigmoid);
  EXPECT_TRUE(experts_of_last(glm4).correction_bias);
  EXPECT_EQ(experts_of_last(glm4).shared->ffn, 1408);

  const ModelConfig ernie = parse(small("ernie4_5_moe"));
  EXPECT_EQ(layers_of(ernie), "deee");
  EXPECT_EQ(ernie.rope_theta, 5e5);
  EXPECT_TRUE(ernie.tie_word_embeddings);
  EXPECT_EQ(experts_of_last(ernie).shared->ffn, 2 * 1536);
  EXPECT_FLOAT_EQ(experts_of_last(ernie).route.least_sum, 1e-12f);
}

// Of the family's own keys, none.
io::JsonValue small_longcat() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "longcat_flash").set("vocab_size", 64).set("hidden_size", 64).set("ffn_hidden_size", 48);
  return json.set("num_layers", 3).set("num_attention_heads", 16);
}

TEST(LongcatFlash, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = parse(small_longcat());
  EXPECT_EQ(config.num_hidden_layers, 3);
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(config.kv_lora_rank, 512);
  EXPECT_EQ(config.head_dim, 192);
  EXPECT_EQ(config.rotary_dim, 64);
  EXPECT_EQ(config.v_head_dim, 128);
  EXPECT_EQ(config.rope_theta, 1e7);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.num_experts, 512);
  EXPECT_EQ(config.identity_experts, 256);
  EXPECT_EQ(config.num_experts_per_tok, 12);
  EXPECT_EQ(config.moe_intermediate_size, 2048);
  EXPECT_EQ(parse(config.to_json()), config);
  const Decoder decoder(config);
  const modules::LayerSpec& layer = decoder.decoder_spec().layers.back();
  ASSERT_EQ(layer.parts.size(), 2u);
  ASSERT_TRUE(layer.shortcut.has_value());
  EXPECT_EQ(layer.shortcut->choices(), 768);
  EXPECT_TRUE(layer.shortcut->correction_bias);
  EXPECT_FALSE(layer.shortcut->route.renormalize);
  EXPECT_EQ(layer.shortcut->route.scale, 6.0f);
  const auto& attention = std::get<modules::MlaAttention::Config>(layer.parts[1].mixer);
  EXPECT_DOUBLE_EQ(attention.scale, std::sqrt(64.0 / 1536 / 192));
  EXPECT_DOUBLE_EQ(attention.latent_scale, std::sqrt(64.0 / 512));
}

TEST(LongcatFlash, NumHiddenLayersCountsAttentions) {
  const ModelConfig three = parse(small_longcat());
  EXPECT_EQ(parse(small_longcat().set("num_hidden_layers", 6)), three);
  const auto without = [](int64_t attentions) {
    io::JsonValue::Object members = small_longcat().as_object();
    std::erase_if(members, [](const io::JsonMember& member) { return member.key == "num_layers"; });
    return io::JsonValue(std::move(members)).set("num_hidden_layers", attentions);
  };
  EXPECT_EQ(parse(without(6)), three);
  EXPECT_HAS(refusal([&] { parse(without(7)); }), "'num_hidden_layers' is 7; expected an even number");
  EXPECT_HAS(refusal([] { parse(small_longcat().set("num_hidden_layers", 8)); }),
             "'num_hidden_layers' is 8; expected two for each of 'num_layers' 3");
}

TEST(LongcatFlash, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* key, const io::JsonValue& value) {
    return refusal([&] { parse(small_longcat().set(key, value)); });
  };
  EXPECT_HAS(refused("head_dim", 32), "'head_dim' is 32 and 'qk_rope_head_dim' 64");
  EXPECT_HAS(refused("qk_head_dim", 100), "'qk_head_dim' is 100");
  EXPECT_EQ(refused("qk_head_dim", 192), "");
  EXPECT_HAS(refused("q_lora_rank", nullptr), "'q_lora_rank'");
  EXPECT_HAS(refused("num_key_value_heads", 4), "latent attention with 4 heads of keys for 16 of queries");
  EXPECT_HAS(refused("moe_topk", 769), "769 of 768 experts compute a token");
  EXPECT_HAS(refused("n_routed_experts", 4000), "4256 experts; expected at most 4096");
  EXPECT_HAS(refused("zero_expert_type", "zero"), "'zero_expert_type'");
  EXPECT_EQ(refused("zero_expert_type", "identity"), "");
  EXPECT_HAS(refused("mla_scale_q_lora", false), "'mla_scale_q_lora'");
  EXPECT_HAS(refused("mla_scale_kv_lora", false), "'mla_scale_kv_lora'");
  EXPECT_HAS(refused("attention_method", "MHA"), "'attention_method'");
  EXPECT_HAS(refused("router_bias", true), "'router_bias'");
  EXPECT_HAS(refused("norm_topk_prob", true), "'norm_topk_prob'");
  EXPECT_EQ(parse(small_longcat().set("zero_expert_num", nullptr)).identity_experts, 0);
  EXPECT_HAS(refusal([] { parse(small_longcat()).to_gguf(); }), "models of type longcat_flash are not written to GGUF");
}

// Every tensor of the file is made of parameters again, but for the matrices of identities, which nobody reads.
TEST(LongcatFlash, IsSavedWithoutMatricesOfIdentities) {
  const Checkpoint golden = open_checkpoint((kGoldens / "longcat_flash").string());
  const ParameterReader reader(golden);
  std::set<std::string> left;
  for (const io::WeightInfo& info : golden.weights->tensors()) left.insert(info.name);
  for (const auto& [name, recipe] : tensors_of(*golden.model, CheckpointFormat::huggingface)) {
    ASSERT_EQ(left.erase(name), 1u) << name;
    const Tensor read = golden.weights->get(name),
                 saved = evaluate(
                     recipe, [&](const std::string&own) { return reader.read(own); }, name);
    ASSERT_EQ(to_string(read.view), to_string(saved.view)) << name;
    EXPECT_EQ(std::memcmp(read.view.data, saved.view.data, static_cast<size_t>(read.view.size_bytes())), 0) << name;
  }
  EXPECT_EQ(left.size(), 2u * 3 * 2) << "gate and up of three identities in two layers";
  for (const std::string& name : left) {
    EXPECT_TRUE(golden.model->may_ignore(name)) << name;
    EXPECT_TRUE(name.find(".mlp.experts.") != std::string::npos) << name;
  }
  EXPECT_TRUE(golden.model->may_ignore("model.mtp.layers.0.eh_proj.weight"));
  EXPECT_FALSE(golden.model->may_ignore("model.layers.0.mlp.experts.4.up_proj.weight"));
}

TEST(ExpertFamilies, LayersWithExperts) {
  const auto ernie = [](int64_t first, int64_t last, int64_t interval) {
    io::JsonValue json = small("ernie4_5_moe");
    json.set("moe_layer_start_index", first).set("moe_layer_end_index", last).set("moe_layer_interval", interval);
    const ModelConfig config = parse(json);
    EXPECT_EQ(layers_of(parse(config.to_json())), layers_of(config));
    return layers_of(config);
  };
  EXPECT_EQ(ernie(0, -1, 1), "eeee");
  EXPECT_EQ(ernie(1, 2, 1), "deed");
  EXPECT_EQ(ernie(0, -1, 2), "dede");
  EXPECT_EQ(layers_of(parse(small("glm4_moe").set("first_k_dense_replace", 3))), "ddde");
}

TEST(ExpertFamilies, GroupsThatCannotBeChosenAreRefused) {
  const auto groups = [](int64_t all, int64_t chosen) {
    return refusal([&] { parse(small("glm4_moe").set("n_group", all).set("topk_group", chosen)); });
  };
  EXPECT_EQ(groups(8, 4), "");
  EXPECT_HAS(groups(3, 1), "8 of 128 experts compute a token, of 1 of 3 groups");
  EXPECT_HAS(groups(4, 5), "of 5 of 4 groups");
  EXPECT_HAS(groups(64, 1), "of 1 of 64 groups");
}

// Every other layer below max_window_layers, which transformers derives where layer_types is not there.
TEST(ExpertFamilies, WindowsOfQwen2Moe) {
  const io::JsonValue windowed = small("qwen2_moe").set("use_sliding_window", true);
  const auto windows = [](const io::JsonValue& json) { return parse(json).layer_windows; };
  EXPECT_EQ(windows(windowed), (std::vector<int64_t>{4096, 0, 4096, 0}));
  EXPECT_EQ(windows(io::JsonValue(windowed).set("sliding_window", 7).set("max_window_layers", 2)),
            (std::vector<int64_t>{7, 0, 0, 0}));
  EXPECT_EQ(windows(small("qwen2_moe").set("sliding_window", 7)), (std::vector<int64_t>(4, 0)));
}

// No rope scaling is stated, since a gpt_oss config without any has that of the published models.
TEST(ExpertFamilies, DefaultRopeOfGptOssIsWritten) {
  const io::JsonValue plain = io::JsonValue::object().set("rope_type", "default").set("rope_theta", 500.0);
  const ModelConfig config = parse(small("gpt_oss").set("rope_parameters", plain));
  EXPECT_EQ(config.rope_scaling.kind, modules::RopeScaling::Kind::none);
  EXPECT_EQ(parse(config.to_json()), config);
}

TEST(ExpertFamilies, WhatIsNotComputedIsRefused) {
  EXPECT_HAS(refusal([] { parse(small("qwen2_moe").set("use_sliding_window", true).set("sliding_window", nullptr)); }),
             "'sliding_window' is null; expected an integer");
  const auto gguf = [](io::JsonValue json) { return refusal([&] { parse(json).to_gguf(); }); };
  EXPECT_EQ(gguf(small("mixtral")), "");
  EXPECT_HAS(gguf(small("glm4_moe").set("n_group", 2)), "groups of experts, which GGUF's glm4moe");
  EXPECT_HAS(gguf(small("ernie4_5_moe").set("moe_layer_end_index", 2)), "layer 3 without experts behind one");
  EXPECT_HAS(gguf(small("ernie4_5_moe").set("moe_norm_min", 0.5)), "moe_norm_min 0.5, which GGUF's ernie4_5-moe");
  EXPECT_HAS(gguf(small("gpt_oss").set("swiglu_limit", 3)), "swiglu_limit 3 and swiglu_alpha 1.702");
  EXPECT_HAS(gguf(small("olmoe").set("norm_topk_prob", true)), "(norm_topk_prob), which GGUF's olmoe");
  EXPECT_HAS(refusal([] { parse(small("qwen2_moe").set("norm_topk_prob", true)).to_gguf(); }), "norm_topk_prob");
}

}  // namespace expert_families_test
}  // namespace eadem::models
