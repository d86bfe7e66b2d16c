// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/modules/base/rope.h"
#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Attention with one head of keys that are their own values, over a window of them and, in layers with a pool, over
// pooled rows of all tokens as well, in one softmax with a sink (kernels/attention/pooled_attention.h):
//   latent = q_a_norm(q_a_proj(x)),   q = the heads of q_b_proj(latent), each divided by its root mean square
//   k      = kv_norm(kv_proj(x))
//   y      = o_b_proj(o_a_proj(attention(q, k, rows)))
// The last `rope.rotary_dim` columns of q and k are rotated, and so are those of the attention's result, back by the
// query's position: what a value contributes depends on its distance. o_a_proj multiplies each group of heads with a
// matrix of its own.
//
// A row is made of the tokens of a window, compressor.kv_norm(sum over them of softmax(gate_proj(x) + position_bias) *
// kv_proj(x)), in columns of their own, and rotated as the window's first token. With two parts kv_proj and gate_proj
// have twice the columns, and the first half of those of the window before it is in the sum, too. With an indexer a
// token attends to `top_k` rows, those of the largest
//   score_r = sum over h of w_h max(0, q_h . i_r / sqrt(head_dim)) / sqrt(heads),
// q = q_b_proj(latent), rotated, w = weights_proj(x) and i rows that the indexer's own compressor makes. The choice has
// no gradient, and neither have the indexer's parameters.
//
// A cache keeps keys for the window, rows for all tokens, and what rows are still made of, in f32, for their length.
//
// Parameters: q_a_proj, q_a_norm, q_b_proj, kv_proj, kv_norm, o_b_proj (.weight); o_a_proj.weight [groups, output_rank,
// heads * head_dim / groups]; sinks [heads]; compressor.{kv_proj,gate_proj,kv_norm}.weight and compressor.position_bias
// [stride, parts * head_dim]; these four below compressor.indexer, and
// compressor.indexer.{q_b_proj,weights_proj}.weight. Source: DeepSeek-AI 2026 (DeepSeek-V4), section 2.3; transformers,
// models/deepseek_v4.
class PooledAttention {
 public:
  struct Indexer {
    int64_t heads = 0;  // 0: there is none, and a token attends to all rows
    int64_t head_dim = 0;
    int64_t top_k = 0;
  };

  struct Config {
    int64_t hidden = 0;
    int64_t heads = 0;
    int64_t head_dim = 0;
    int64_t query_rank = 0;
    int64_t groups = 0;  // of heads, in the output
    int64_t output_rank = 0;
    int64_t window = 0;
    double scale = 0;  // factor on q . k
    double norm_eps = 0;
    RopeConfig rope;     // of q and k; its rotation is that of the last columns
    int64_t stride = 0;  // tokens of a pooled row; 0: there are none
    int64_t parts = 1;
    Indexer indexer;

    // The names of its parameters, and their shapes.
    std::vector<std::pair<std::string, Shape>> parameters() const;
    // Whether a parameter is only read by the indexer.
    static bool is_of_indexer(const std::string& parameter) { return parameter.starts_with("compressor.indexer."); }
    // The tables that it reads: that of queries and keys, that of results, and that of rows.
    std::vector<RopeConfig> ropes() const;
  };

  PooledAttention(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]. In an encoded cache the rows are bf16. Throws Unsupported on several
  // tensor-parallel ranks, and InvalidArgument for sizes that the ops refuse.
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  ValueId project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const;
  ValueId normalize(BuildContext& context, const char* name, int64_t size, ValueId x) const;
  // [tokens, heads * width] -> [tokens, heads, width], rotated by the table of `rope`.
  ValueId rotate(BuildContext& context, const char* name, const RopeConfig& rope, int64_t heads, int64_t width,
                 ValueId x) const;
  // Pooled rows of `width` columns: those of the step, or the state that holds them.
  ValueId build_rows(BuildContext& context, int64_t width, ValueId x) const;
  ValueId build_selection(BuildContext& context, ValueId x, ValueId latent) const;
  // The attention's result [tokens, heads, head_dim].
  ValueId attend(BuildContext& context, ValueId x, ValueId latent, ValueId q, ValueId k, ValueId sinks) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
