// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// Writes a layer's new keys and values [tokens, kv_heads, head_dim] into its cache. States: `k_cache`, `v_cache`
// [num_blocks, kv_heads, block_size, head_dim] below the scope.
class KvCacheStore {
 public:
  struct Caches {
    ValueId k;
    ValueId v;
  };
  KvCacheStore(int64_t kv_heads, int64_t head_dim) : kv_heads_(kv_heads), head_dim_(head_dim) {}

  // Returns the caches as they are after the write.
  Caches build(BuildContext& context, ValueId k, ValueId v, int layer) const;

 private:
  int64_t kv_heads_;  // heads of this rank
  int64_t head_dim_;
};

}  // namespace eadem::modules
