// SPDX-License-Identifier: Apache-2.0
//
// The families with linear attention: what their configurations mean, and what is refused. Logits, chunks, conversions
// and a step of training are those of every family (families_test.cc, tests/engine/golden_test.cc).
#include <gtest/gtest.h>

#include <filesystem>

#include "eadem/models/decoders/decoder.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace linear_families_test {

using test::refusal;

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

// As published, but for sizes.
io::JsonValue qwen3_next() {
  return io::parse_json(
      R"({"model_type": "qwen3_next", "attention_bias": false, "decoder_sparse_step": 1, "full_attention_interval": 4,
          "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64,
          "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "linear_value_head_dim": 8, "max_position_embeddings": 256,
          "mlp_only_layers": [], "moe_intermediate_size": 16, "norm_topk_prob": true, "num_attention_heads": 4,
          "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 9, "num_key_value_heads": 2,
          "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null,
          "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 16,
          "tie_word_embeddings": false, "use_cache": true, "use_sliding_window": false, "vocab_size": 64})",
      "config.json");
}

io::JsonValue kimi_linear() {
  return io::parse_json(
      R"({"model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
          "hidden_size": 32, "intermediate_size": 64, "kv_lora_rank": 16,
          "linear_attn_config": {"full_attn_layers": [4, 8], "head_dim": 8, "kda_layers": [1, 2, 3, 5, 6, 7],
                                 "num_heads": 4, "short_conv_kernel_size": 4},
          "mla_use_nope": true, "model_max_length": 256, "moe_intermediate_size": 16, "moe_layer_freq": 1,
          "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_attention_heads": 4,
          "num_expert_group": 1, "num_experts": 8, "num_experts_per_token": 2, "num_hidden_layers": 8,
          "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-05, "rope_scaling": null,
          "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1,
          "use_cache": true, "use_grouped_topk": true, "v_head_dim": 8, "vocab_size": 64})",
      "config.json");
}

// 'l' for linear attention, 'a' for attention.
std::string mixers_of(const ModelConfig& config) {
  const Decoder decoder(config);
  std::string text;
  for (const modules::LayerSpec& layer : decoder.decoder_spec().layers)
    text += std::holds_alternative<modules::GatedDeltaNet::Config>(layer.mixer) ? 'l' : 'a';
  return text;
}

TEST(LinearFamilies, LayersOfAttentionComeAtIntervals) {
  io::JsonValue json = qwen3_next();
  EXPECT_EQ(mixers_of(parse(json)), "lllalllal");
  json.set("full_attention_interval", 3);
  EXPECT_EQ(mixers_of(parse(json)), "llallalla");
  io::JsonValue types = io::JsonValue::array();
  for (int layer = 0; layer < 9; ++layer) types.push_back(layer < 2 ? "full_attention" : "linear_attention");
  json.set("layer_types", std::move(types));
  EXPECT_EQ(mixers_of(parse(json)), "aalllllll") << "layer_types wins";
  EXPECT_EQ(mixers_of(parse(kimi_linear())), "lllallla");
}

TEST(LinearFamilies, PublishedConfigurationsAreRead) {
  const ModelConfig qwen = parse(qwen3_next());
  EXPECT_EQ(qwen.rotary_dim, 4);
  EXPECT_EQ(qwen.linear_value_heads, 4);
  EXPECT_TRUE(std::get<modules::CausalAttention::Config>(Decoder(qwen).decoder_spec().layers[3].mixer).gated);
  const ModelConfig kimi = parse(kimi_linear());
  EXPECT_EQ(kimi.max_position_embeddings, 256);
  EXPECT_EQ(kimi.head_dim, 12) << "not the head_dim of the file";
  EXPECT_EQ(kimi.linear_key_dim, 8);
  EXPECT_FALSE(kimi.has_experts(0));
  EXPECT_TRUE(kimi.has_experts(1));
  EXPECT_FALSE(std::get<modules::MlaAttention::Config>(Decoder(kimi).decoder_spec().layers[3].mixer).rotated);
  for (const ModelConfig& config : {qwen, kimi}) EXPECT_EQ(parse(config.to_json()), config);
}

TEST(LinearFamilies, WhatPredictsFurtherTokensIsIgnored) {
  EXPECT_TRUE(Decoder(parse(qwen3_next())).may_ignore("mtp.layers.0.mlp.gate.weight"));
  EXPECT_FALSE(Decoder(parse(qwen3_next())).may_ignore("model.layers.9.mlp.gate.weight"));
}

TEST(LinearFamilies, WhatIsNotComputedIsRefused) {
  const auto refused = [](io::JsonValue json, const char* key, const io::JsonValue& value) {
    json.set(key, value);
    return refusal([&] { parse(json); });
  };
  EXPECT_HAS(refused(kimi_linear(), "mla_use_nope", false), "'mla_use_nope' is false; only true is honoured");
  EXPECT_HAS(refused(kimi_linear(), "moe_router_activation_func", "softmax"), "'moe_router_activation_func' is not");
  EXPECT_HAS(refused(kimi_linear(), "num_experts_per_tok", 3),
             "'num_experts_per_token' is 2 and 'num_experts_per_tok' 3");
  EXPECT_HAS(refused(qwen3_next(), "use_sliding_window", true), "'use_sliding_window'");
  EXPECT_HAS(refused(qwen3_next(), "linear_num_value_heads", 3), "linear attention of 3 value heads for 2 key heads");
  EXPECT_HAS(refused(qwen3_next(), "linear_conv_kernel_dim", 9), "a convolution over 9 tokens; expected 2 to 8");
  EXPECT_HAS(refused(qwen3_next(), "layer_types", io::JsonValue::array().push_back("full_attention")), "9 entries");
  EXPECT_HAS(refusal([] { parse(kimi_linear().set("norm_topk_prob", false)); }),
             "'moe_renormalize' is true, 'norm_topk_prob' is false");
  EXPECT_FALSE(parse(kimi_linear().set("moe_renormalize", nullptr)).norm_topk_prob);
}

}  // namespace linear_families_test
}  // namespace eadem::models
