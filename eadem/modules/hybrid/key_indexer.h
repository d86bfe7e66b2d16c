// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/modules/base/rope.h"
#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Selects the tokens that a token attends to: those `top_k` of largest score, where
//   score_j = sum_h w_h max(0, q_h . k_j / sqrt(head_dim)) / sqrt(heads),
// q = wq_b(latent of the query), k = k_norm(wk(x)), both rotated in their first channels, and w = weights_proj(x).
// Keys are kept in a cache of their own, plain, in the dtype of the KV cache or in bf16 where that is encoded.
// Nothing has a gradient: a choice is taken as it is.
// Parameters: wq_b, wk, weights_proj (.weight); k_norm (.weight, .bias).
// Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1; transformers, models/deepseek_v32.
class KeyIndexer {
 public:
  struct Config {
    int64_t heads = 0;  // 0: there is no indexer, and every token is attended to
    int64_t head_dim = 0;
    int64_t top_k = 0;

    // The names of its parameters, and their shapes.
    std::vector<std::pair<std::string, Shape>> parameters(int64_t hidden, int64_t query_rank) const {
      return {{"wq_b.weight", {heads * head_dim, query_rank}},
              {"wk.weight", {head_dim, hidden}},
              {"k_norm.weight", {head_dim}},
              {"k_norm.bias", {head_dim}},
              {"weights_proj.weight", {heads, hidden}}};
    }
  };

  // `rope` is that of the attention; the indexer rotates by halves whatever its style.
  KeyIndexer(const Config& config, int64_t hidden, int64_t query_rank, RopeConfig rope, int layer);

  // x [tokens, hidden], latent [tokens, query_rank] -> positions [tokens, 1, top_k]; see
  // kernels/attention/selected_attention.h. Every tensor-parallel rank makes the same choice.
  ValueId build(BuildContext& context, ValueId x, ValueId latent) const;

 private:
  ValueId project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const;
  ValueId rotate(BuildContext& context, const char* name, int64_t heads, ValueId flat) const;

  Config config_;
  int64_t hidden_, query_rank_;
  RopeConfig rope_;
  int layer_;
};

}  // namespace eadem::modules
