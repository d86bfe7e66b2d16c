// SPDX-License-Identifier: Apache-2.0
//
// The configurations of families with state-space layers: defaults, spellings, and what is refused. Their goldens are
// compared in families_test.cc and tests/engine.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "eadem/io/gguf.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace hybrid_families_test {

using modules::CausalAttention;
using modules::Mamba2;
using modules::ParallelMixers;
using test::refusal;

ModelConfig parse(const std::string& text) {
  return ModelConfig::from_json(io::JsonReader::parse(text, "config.json"));
}
ModelConfig parse(const io::JsonValue& json) { return parse(io::to_json(json)); }

io::JsonValue small(const char* type) {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", type).set("vocab_size", 64).set("hidden_size", 64).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 4).set("num_attention_heads", 16);
}

io::JsonValue list(std::initializer_list<io::JsonValue> values) {
  io::JsonValue result = io::JsonValue::array();
  for (const io::JsonValue& value : values) result.push_back(value);
  return result;
}

// A letter for each layer, by what it is made of.
std::string layers_of(const ModelConfig& config) {
  std::string text;
  const Decoder model(config);
  for (const modules::LayerSpec& layer : model.decoder_spec().layers) {
    text += std::holds_alternative<Mamba2::Config>(layer.mixer)            ? "M"
            : std::holds_alternative<CausalAttention::Config>(layer.mixer) ? "*"
            : std::holds_alternative<ParallelMixers::Config>(layer.mixer)  ? "P"
                                                                           : "";
    text += std::holds_alternative<modules::DenseMlp::Config>(layer.mlp) ? "-"
            : std::holds_alternative<modules::MoeMlp::Config>(layer.mlp) ? "E"
                                                                         : "";
    text += ' ';
  }
  return text;
}

TEST(HybridFamilies, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig granite = parse(small("granitemoehybrid"));
  EXPECT_EQ(layers_of(granite), "ME ME ME ME ");
  EXPECT_EQ(granite.mamba.heads, 128);
  EXPECT_EQ(granite.mamba.inner(), 2 * granite.hidden_size);
  EXPECT_EQ(granite.mamba.state, 256);
  EXPECT_TRUE(granite.mamba.norm);
  EXPECT_EQ(granite.num_experts, 8);
  EXPECT_EQ(granite.shared_expert_intermediate_size, 1024);
  EXPECT_EQ(granite.nope_layers.size(), 4u);
  EXPECT_EQ(layers_of(parse(small("granitemoe"))), "*E *E *E *E ");
  EXPECT_EQ(parse(small("granitemoeshared")).shared_expert_intermediate_size, 0);
  EXPECT_EQ(parse(small("granitemoeshared").set("shared_intermediate_size", 20)).shared_expert_intermediate_size, 20);

  const ModelConfig falcon = parse(small("falcon_h1").set("mamba_n_heads", 4));
  EXPECT_EQ(layers_of(falcon), "P- P- P- P- ");
  EXPECT_EQ(falcon.mamba.inner(), 1024);
  EXPECT_EQ(falcon.num_key_value_heads, 8);
  EXPECT_FALSE(falcon.mamba.norm);
  EXPECT_EQ(parse(small("falcon_h1").set("mamba_n_heads", 4).set("mamba_d_ssm", nullptr)).mamba.inner(), 128);
  // null is false, as None is to transformers, where an absent key is true.
  const auto normed = [] { return small("falcon_h1").set("mamba_n_heads", 4).set("mamba_rms_norm", true); };
  EXPECT_TRUE(parse(normed()).mamba.norm_before_gate && parse(normed()).mamba.conv_bias);
  EXPECT_FALSE(parse(normed().set("mamba_norm_before_gate", nullptr)).mamba.norm_before_gate);
  EXPECT_FALSE(parse(normed().set("mamba_conv_bias", nullptr)).mamba.conv_bias);

  const ModelConfig nemotron = parse(small("nemotron_h"));
  EXPECT_EQ(layers_of(nemotron), "M E * - ");
  EXPECT_EQ(nemotron.mamba.inner(), 128 * 64);
  EXPECT_EQ(nemotron.mamba.groups, 8);
  EXPECT_EQ(nemotron.mamba.dt_min, 0.001);
  EXPECT_EQ(nemotron.head_dim, 128);
  EXPECT_EQ(nemotron.hidden_act, kernels::ActivationKind::relu2);
  EXPECT_EQ(nemotron.moe_intermediate_size, 7688);
}

TEST(HybridFamilies, SpellingsOfLayersAndLimits) {
  const auto kinds = [](const io::JsonValue& names) {
    return parse(small("granitemoehybrid").set("layer_types", names)).layer_pattern;
  };
  EXPECT_EQ(kinds(list({"mamba", "attention", "mamba", "mamba"})), "M*MM");
  EXPECT_EQ(kinds(list({"linear_attention", "full_attention", "mamba", "attention"})), "M*M*");
  EXPECT_HAS(refusal([&] { kinds(list({"mamba", "mamba"})); }), "2 kinds of layers for 4 layers");
  EXPECT_HAS(refusal([&] { kinds(list({"mamba", "mlp", "mamba", "mamba"})); }), "'layer_types' has other kinds");
  EXPECT_HAS(refusal([&] { kinds(list({"sliding_attention"})); }), "\"sliding_attention\", which is not honoured");

  const auto nemotron = [](const char* pattern) {
    return parse(small("nemotron_h").set("hybrid_override_pattern", pattern)).layer_pattern;
  };
  EXPECT_EQ(nemotron("MM*-ME"), "MM*-ME") << "num_hidden_layers is not read";
  EXPECT_HAS(refusal([&] { nemotron("MX"); }), "letters M, *, - and E");
  EXPECT_HAS(refusal([&] { nemotron(""); }), "letters M, *, - and E");

  const auto limit = [](const std::string& limits) {
    const std::string text = io::to_json(small("granitemoehybrid"));
    return parse(text.substr(0, text.rfind('}')) + ", \"time_step_limit\": " + limits + "}").mamba;
  };
  EXPECT_EQ(limit("[0.5, 2]").dt_max, 2);
  EXPECT_EQ(limit("[0.5, Infinity]").dt_max, HUGE_VAL);
  EXPECT_EQ(limit(R"([0.5, {"__float__": "Infinity"}])").dt_min, 0.5);
  EXPECT_HAS(refusal([&] { limit("[0.5]"); }), "two numbers");
  EXPECT_HAS(refusal([&] { limit("[3, 2]"); }), "limits of time steps are 3 and 2");
  EXPECT_EQ(parse(small("granitemoehybrid").set("mamba_d_head", "auto").set("mamba_n_heads", 4)).mamba.head_dim, 32);
}

TEST(HybridFamilies, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* type, const char* key, const io::JsonValue& value) {
    return refusal([&] { parse(small(type).set(key, value)); });
  };
  EXPECT_HAS(refused("granitemoehybrid", "position_embedding_type", "absolute"), "known are rope and nope");
  EXPECT_HAS(refused("granitemoehybrid", "normalization_function", "layernorm"), "only \"rmsnorm\" is honoured");
  EXPECT_HAS(refused("granitemoehybrid", "mamba_d_head", 5), "128 state-space heads of 5 dimensions for 128 in all");
  EXPECT_HAS(refused("granitemoehybrid", "mamba_n_groups", 3), "128 state-space heads do not divide into 3 groups");
  EXPECT_HAS(refused("granitemoehybrid", "mamba_d_conv", 9), "a convolution over 9 tokens");
  EXPECT_HAS(refused("falcon_h1", "ssm_multipliers", list({1, 2})), "5 numbers");
  EXPECT_HAS(refused("falcon_h1", "attn_layer_indices", list({1})), "'attn_layer_indices'");
  EXPECT_HAS(refused("nemotron_h", "attention_bias", true), "only false is honoured");
  EXPECT_HAS(refused("nemotron_h", "sliding_window", 8), "'sliding_window'");
  EXPECT_HAS(refused("nemotron_h", "mamba_hidden_act", "relu"), "only silu is honoured");
  EXPECT_HAS(refused("lfm2", "hidden_act", "relu"), "MLPs of models of type lfm2 have silu alone");
}

TEST(HybridFamilies, WhatGgufFilesCannotState) {
  const auto refused = [](const io::JsonValue& json) { return refusal([&] { parse(json).to_gguf(); }); };
  EXPECT_HAS(refused(small("nemotron_h")), "MLPs and experts in one model");
  EXPECT_HAS(refused(small("nemotron_h").set("hybrid_override_pattern", "M*").set("time_step_min", 0)),
             "limits of time steps of 0 and inf");
  const auto falcon = [] { return small("falcon_h1").set("mamba_n_heads", 4); };
  EXPECT_HAS(refused(falcon().set("mamba_rms_norm", true)), "a norm before the gate");
  EXPECT_HAS(refused(falcon().set("mlp_bias", true)), "biases of projections");
  EXPECT_EQ(refused(falcon().set("mamba_rms_norm", true).set("mamba_norm_before_gate", false)), "");
  EXPECT_EQ(refused(small("nemotron_h").set("hybrid_override_pattern", "M*-")), "");
}

// Hybrids may have no state-space layer at all; their configuration still has the numbers of such layers.
TEST(HybridFamilies, GgufFilesWithoutStateSpaceLayersReadBack) {
  std::string pattern = (std::filesystem::temp_directory_path() / "eadem_hybrid_XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const std::string file = pattern + "/model.gguf";
  const Tensor embedding = Tensor::on_host(DType::f32, Shape{64, 64});
  std::fill_n(embedding.view.as<float>(), 64 * 64, 0.0f);
  const io::JsonValue kinds = list({"attention", "attention", "attention", "attention"});
  for (const io::JsonValue& json : {small("granitemoehybrid").set("layer_types", kinds).set("num_local_experts", 0),
                                    small("nemotron_h").set("hybrid_override_pattern", "*-")}) {
    const ModelConfig config = parse(json);
    const io::NamedTensor tensors[] = {{"token_embd.weight", embedding.view}};
    io::write_gguf(file, config.to_gguf(), tensors);
    const ModelConfig read = ModelConfig::from_gguf(*io::GgufFile::open(file));
    EXPECT_EQ(read.mamba.norm, config.mamba.norm) << config.model_type;
    EXPECT_EQ(refusal([&] { huggingface_config(read, nullptr).to_json(); }), "") << config.model_type;
  }
  std::filesystem::remove_all(pattern);
}

}  // namespace hybrid_families_test
}  // namespace eadem::models
