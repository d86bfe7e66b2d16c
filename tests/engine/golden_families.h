// SPDX-License-Identifier: Apache-2.0
//
// The dense families that have a small golden in tests/data/golden, each under the name of its folder.
#pragma once

namespace eadem::test {

struct GoldenFamily {
  const char* folder;
  const char* gguf_refusal = nullptr;  // what a GGUF file cannot state of this golden; null: nothing
};

inline constexpr GoldenFamily kGoldenFamilies[] = {{"gemma2"},
                                                   {"phi3", "longrope scaling"},
                                                   {"phi3_window"},
                                                   {"olmo2"},
                                                   {"olmo3", "models of type olmo3"},
                                                   {"smollm3"},
                                                   {"granite"},
                                                   {"starcoder2"},
                                                   {"gpt_neox"},
                                                   {"gpt_neox_sequential"},
                                                   {"gpt2"},
                                                   {"cohere2"},
                                                   {"glm4"},
                                                   {"exaone4"},
                                                   {"hunyuan_v1_dense"},
                                                   {"ernie4_5"}};

}  // namespace eadem::test
