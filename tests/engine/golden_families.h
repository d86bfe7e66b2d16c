// SPDX-License-Identifier: Apache-2.0
//
// The families that have a small golden with one step of training in tests/data/golden, each under the name of its
// folder.
#pragma once

namespace eadem::test {

struct GoldenFamily {
  const char* folder;
  const char* gguf_refusal = nullptr;  // what a GGUF file cannot state of this golden; null: nothing
  // What a GGUF file has of this golden: its numbers, or numbers in another form (logarithms, products with
  // multipliers).
  enum class Gguf : uint8_t { exact, rounded, folded } gguf = Gguf::exact;
  bool quantized = false;  // its experts are in MXFP4: there is no step of training
};

inline constexpr GoldenFamily kGoldenFamilies[] = {
    {"gemma2"},
    {"gemma3_cap", "a soft cap of logits"},
    {"gemma3_scaled", "rope scaling of layers with a window"},
    {"gemma3_llama3"},
    {"gemma4"},
    {"gemma4_equal"},
    {"gemma4_scaled", "rope scaling of layers with a window"},
    {"gemma4_experts"},
    {"phi3"},
    {"phi3_window"},
    {"olmo2"},
    {"olmo3"},
    {"olmo3_llama3"},
    {"olmo3_scaled", "rope scaling of layers with a window"},
    {"smollm3"},
    {"smollm3_window", "attention windows"},
    {"granite"},
    {"granite_linear"},
    {"starcoder2"},
    {"gpt_neox"},
    {"gpt_neox_sequential"},
    {"gpt2"},
    {"gpt2_odd", "activation_function is not gelu_new"},
    {"gpt2_scaled", "scores with a scale of their own"},
    {"cohere2"},
    {"cohere2_full", "layers that rotate nothing and no windows"},
    {"glm4"},
    {"exaone4"},
    {"exaone4_full", "layers that rotate nothing and no windows"},
    {"hunyuan_v1_dense"},
    {"ernie4_5"},
    {"granitemoehybrid", nullptr, GoldenFamily::Gguf::rounded},
    {"granitemoehybrid_dense", "limits of time steps"},
    {"granitemoe"},
    {"granitemoeshared"},
    {"falcon_h1", nullptr, GoldenFamily::Gguf::folded},
    {"falcon_h1_norm", "one matrix for embeddings and logits"},
    {"falcon_h1_bias", "biases of projections"},
    {"nemotron_h", "limits of time steps"},
    {"nemotron_h_usual", nullptr, GoldenFamily::Gguf::rounded},
    {"nemotron_h_moe", nullptr, GoldenFamily::Gguf::rounded},
    {"nemotron_h_bias", "MLPs and experts in one model"},
    {"lfm2"},
    {"lfm2_bias", "biases of convolutions"},
    {"qwen3_next", "layer 1 without experts"},
    {"qwen3_next_all", nullptr, GoldenFamily::Gguf::rounded},
    {"qwen3_5", nullptr, GoldenFamily::Gguf::rounded},
    {"qwen3_5_moe", "at no regular interval"},
    {"qwen3_5_moe_usual", nullptr, GoldenFamily::Gguf::rounded},
    {"kimi_linear", nullptr, GoldenFamily::Gguf::rounded},
    {"gpt_oss", "yarn scaling with parameters of its own"},
    {"gpt_oss_mxfp4", nullptr, GoldenFamily::Gguf::exact, /*quantized=*/true},
    {"olmoe"},
    {"olmoe_clip", "limits of q, k and v"},
    {"qwen2_moe_window", "norm_topk_prob"},
    {"minimax_m2"},
    {"mixtral_window"},
    {"glm4_moe_ungrouped"},
    {"ernie4_5_moe_leading"},
    {"ernie4_5_moe_interval"},
    {"ernie4_5_moe_bias", "biases"},
    {"deepseek_v2_bias", "biases of MLPs"},
    {"deepseek_v3_llama3"},
    {"deepseek_v32"},
    {"deepseek_v4", "rows of 12 tokens, not 128"},
    {"deepseek_v4_usual"},
    {"mistral4", "yarn scaling with parameters of its own"},
    {"mistral4_usual"},
    {"longcat_flash", "models of type longcat_flash are not written to GGUF files"},
    {"longcat_flash_yarn", "models of type longcat_flash are not written to GGUF files"},
    {"llama4", "other layers than every fourth rotate nothing"},
    {"llama4_plain", "other layers than every fourth rotate nothing"},
    {"llama4_usual"}};

}  // namespace eadem::test
