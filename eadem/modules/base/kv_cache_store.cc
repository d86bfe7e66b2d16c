// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/kv_cache_store.h"

#include "eadem/ops/attention/kv_append.h"

namespace eadem::modules {

KvCacheStore::Caches KvCacheStore::build(BuildContext& context, ValueId k, ValueId v, int layer) const {
  Graph& graph = context.graph;
  const WeightType& stored = context.hardware.of(Role::attention, layer).precision.kv_cache.value;
  const auto add = [&](const char* name, int64_t width) {
    TensorType row(stored.dtype, {kv_heads_, width}, stored.encoding);
    if (context.num_ranks > 1) row.sharding = Sharding::along(0);
    return context.add_state({.name = graph.scoped_name(name), .row = row, .window = window_});
  };
  const ValueId k_cache = add("k_cache", head_dim_), v_cache = add("v_cache", value_dim_);
  const std::vector<ValueId> written =
      graph.add(std::make_shared<ops::KvAppend>(), {k, v, context.group_of(window_).slots, k_cache, v_cache});
  return {written[0], written[1]};
}

}  // namespace eadem::modules
