// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Writes a layer's new keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim] into its cache.
// States: `k_cache`, `v_cache` [blocks, kv_heads, block_size, head_dim or value_dim] below the scope, in the cache
// group of the window.
class KvCacheStore {
 public:
  KvCacheStore(int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t window)
      : kv_heads_(kv_heads), head_dim_(head_dim), value_dim_(value_dim), window_(window) {}

  // Returns the caches as they are after the write.
  KvValues build(BuildContext& context, ValueId k, ValueId v, int layer) const;
  // For keys whose first columns are the values: one state, `latent_cache`, of head_dim columns, whole on
  // every rank.
  ValueId build_latent(BuildContext& context, ValueId k, int layer) const;

 private:
  ValueId add_state(BuildContext& context, const char* name, int64_t width, int layer, bool divided) const;

  int64_t kv_heads_;  // heads of this rank
  int64_t head_dim_;  // of keys
  int64_t value_dim_;
  int64_t window_;  // of the attention that reads them; 0: none
};

}  // namespace eadem::modules
