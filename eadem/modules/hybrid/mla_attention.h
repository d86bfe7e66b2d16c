// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "eadem/modules/base/rope.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/modules/hybrid/key_indexer.h"
#include "eadem/ops/attention/scale_by_position.h"

namespace eadem::modules {

// Multi-head latent attention, in its absorbed form: what is kept of a token is one row for all heads,
//   row = [latent | key],  latent = latent_scale * norm(the first `latent_dim` outputs of kv_a_proj_with_mqa),
//   key = the others, rotated
// and head h with the query [nope | rope] of q computes
//   query = [k_b_proj[h] nope | rotated rope],  y = v_b_proj[h] sum_j softmax_j(scale * query . row_j) latent_j.
// This is attention with the keys [k_b_proj[h]^T latent | key] and the values v_b_proj[h] latent, neither of which is
// ever made. Training, prefill and decode compute it alike, so that a token's bits depend on nothing else.
// With the option latent_form of `decompressed`, serving makes these keys and values of the cached rows for the tokens
// of prompts (ops/attention/latent_attention.h): what a token gets then depends on whether it is one of its prompt. It
// does not where there is an indexer, whose choice differs from token to token.
// Parameters: q_proj, or q_a_proj, q_a_layernorm and q_b_proj; kv_a_proj_with_mqa, kv_a_layernorm, o_proj (.weight,
// .bias); indexer (key_indexer.h); k_b_proj.weight [heads, latent_dim, nope_dim], v_b_proj.weight [heads, value_dim,
// latent_dim]. Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
class MlaAttention {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t heads = 0;
    int64_t query_rank = 0;  // 0: queries are made from x at once
    int64_t latent_dim = 0;
    int64_t nope_dim = 0;   // of a head's query, not rotated
    int64_t value_dim = 0;  // of a head
    double scale = 0;       // factor on query . row
    double latent_scale = 1;
    bool bias = false;  // of q_a_proj, kv_a_proj_with_mqa and o_proj
    double norm_eps = 1e-6;
    RopeConfig rope;      // rotary_dim: of the rest of a head's query, and of the key
    bool rotated = true;  // else the rest and the key are as they are
    std::optional<kernels::ScaleByPositionAttrs> temperature;  // of queries, by position
    // With it a token attends to the rows that it selects. It reads the latent of the query, so query_rank is not 0.
    KeyIndexer::Config indexer;

    int64_t query_dim() const { return nope_dim + rope.rotary_dim; }
    int64_t row_dim() const { return latent_dim + rope.rotary_dim; }
  };

  MlaAttention(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]. Tensor-parallel ranks divide the heads, and each keeps every row.
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  ValueId project(BuildContext& context, const LinearRequest& request, ValueId x) const;
  ValueId normalize(BuildContext& context, const char* name, int64_t size, ValueId x) const;
  ValueId rotate(BuildContext& context, const char* name, ValueId x) const;
  // What queries are made from: x, or the latent [tokens, query_rank].
  ValueId build_query_input(BuildContext& context, ValueId x) const;
  // The matrices of heads.
  LinearRequest key_matrix(BuildContext& context) const;
  LinearRequest value_matrix(BuildContext& context) const;
  // Whether the tokens of prompts attend to keys and values that are made of the rows.
  bool decompresses(const BuildContext& context) const;
  // [tokens, heads, row_dim], or query_dim where that is so.
  ValueId build_query(BuildContext& context, ValueId input) const;
  ValueId build_row(BuildContext& context, ValueId x) const;  // [tokens, 1, row_dim]
  // [tokens, heads, value_dim]
  ValueId build_in_forms(BuildContext& context, ValueId query, ValueId row) const;
  ValueId build_absorbed(BuildContext& context, ValueId x, ValueId input, ValueId query, ValueId row) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
