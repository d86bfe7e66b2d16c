// SPDX-License-Identifier: Apache-2.0
//
// AttentionFactory hides where keys and values are kept and how far back a token looks.
#pragma once

#include <optional>
#include <span>

#include "eadem/modules/build_context.h"

namespace eadem::modules {

struct AttentionRequest {
  int64_t heads = 0;     // heads of this rank
  int64_t kv_heads = 0;  // heads of this rank
  int64_t sharing = 0;   // query heads of all ranks that share a key head; 0: as on this rank
  int64_t head_dim = 0;
  int64_t value_dim = 0;  // of a head's values; 0: head_dim
  bool latent = false;    // v is k: its first value_dim columns are the values
  double scale = 1.0;
  int64_t window = 0;  // 0: unlimited
  double softcap = 0;  // of scores; 0: none
  bool sinks = false;
  int64_t selected = 0;  // entries of the selection; 0: there is none, and every key is attended to
  int64_t span = 1;      // positions of an entry
  int64_t chunk = 0;     // of positions that see each other; 0: no chunks. Not beside a window
  int layer = -1;
  std::optional<int> kv_layer;  // the earlier layer whose keys and values it reads; none: its own
  CacheSpec cache;

  // A token sees no more than within a window of this length, which says what a cache has to keep; 0: everything. Of
  // chunks a cache keeps the last C - 1 tokens too, though a token at the beginning of one sees fewer.
  int64_t reach() const { return window > 0 ? window : chunk; }
};

// q, k, v are [tokens, heads or kv_heads, head_dim or value_dim], rotated; k and v are absent where they are another
// layer's. sinks [heads] f32 and selection [tokens, kv_heads, selected] i32 (kernels/attention/selected_attention.h),
// if the request has them. The result is [tokens, heads, value_dim].
struct AttentionInputs {
  ValueId q, k, v;
  ValueId sinks = pipeline::kNoValue;
  ValueId selection = pipeline::kNoValue;
};

struct AttentionStrategy {
  std::string_view name;
  Verdict (*can_handle)(const AttentionRequest& request);
  ValueId (*build)(BuildContext& context, const AttentionRequest& request, const AttentionInputs& inputs);
};

class AttentionFactory {
 public:
  static std::span<const AttentionStrategy* const> strategies();

  // Adds the cache write and the attention to the graph and records the decision. Throws Unsupported with every
  // refusal, and where a layer whose keys and values are wanted is not in the graph.
  static ValueId build(BuildContext& context, AttentionRequest request, const AttentionInputs& inputs);
};

}  // namespace eadem::modules
