// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/modules/base/rope.h"
#include "eadem/modules/build_context.h"
#include "eadem/ops/attention/compress_keys.h"

namespace eadem::modules {

// Native sparse attention: three branches attend with the same queries, each to keys and values of its own,
//   y = o_proj(sum over branches b of sigmoid(g_b(x)) * attention_b(q, k_b, v_b)),   a gate for each head,
//   compressed  weighted sums of the keys and values of `grid.length` tokens, every `grid.stride` tokens
//   selected    the keys of `top_n` blocks of `span` tokens: those of the largest weight in the compressed branch,
//   summed
//               over the query heads of a key-value head, after the first and the local ones
//   window      the keys of the last `window` tokens
// (kernels/attention/compressed_attention.h). Queries and keys are rotated, and compressed after that. The choice of
// blocks has no gradient; the compressed branch is trained by its own result.
//
// A cache keeps the compressed rows and the selected branch's keys and values for all tokens, those of the window for
// the window, and what rows are still made of for the length of one. With `length` and `window` far below the context
// that is the memory of one attention, and of 1 / stride of one.
//
// Parameters: q_proj, o_proj; for each branch k_proj, v_proj, g_proj below `compressed`, `selected` and `window` (all
// .weight); compressed.k_weight, compressed.v_weight [kv_heads, length], the weights of a sum, and
// compressed.k_position [kv_heads, length, head_dim], compressed.v_position [kv_heads, length, value_dim], what is
// added to each place in a block before it. Source: Yuan et al. 2025 (arXiv 2502.11089), section 3. Its network that
// makes a compressed row of a block is a weighted sum here.
class NativeSparseAttention {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t heads = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;  // of queries and keys
    int64_t value_dim = 0;
    double scale = 0;  // factor on q . k
    kernels::RowGrid grid;
    int64_t span = 0;  // tokens of a block, a multiple of grid.stride
    int64_t top_n = 0;
    int64_t first_blocks = 1;
    int64_t local_blocks = 2;
    int64_t window = 0;
    RopeConfig rope;

    // The names of its parameters, and their shapes.
    std::vector<std::pair<std::string, Shape>> parameters() const;
  };

  NativeSparseAttention(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]. In an encoded cache the compressed rows are bf16. Throws Unsupported on
  // several tensor-parallel ranks, and InvalidArgument for sizes that the ops refuse.
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  ValueId project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const;
  ValueId split(BuildContext& context, const char* name, int64_t heads, int64_t width, ValueId flat) const;
  KvValues build_kv(BuildContext& context, ValueId x) const;
  // Compressed keys or values of `x`, or of the cache that holds them; `name` is "k" or "v".
  ValueId compress(BuildContext& context, const std::string& name, int64_t width, ValueId x) const;
  // The compressed rows.
  KvValues build_rows(BuildContext& context, ValueId x) const;
  ValueId build_compressed(BuildContext& context, ValueId q, const KvValues& rows) const;
  ValueId build_selection(BuildContext& context, ValueId q, ValueId keys) const;
  // Multiplies a branch's result y [tokens, heads, value_dim] by the branch's gates, and returns it as rows of heads *
  // value_dim values. The gates' parameters are in the current scope.
  ValueId gate(BuildContext& context, ValueId x, ValueId y) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
