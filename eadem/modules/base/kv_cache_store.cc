// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/kv_cache_store.h"

#include "eadem/ops/attention/kv_append.h"

namespace eadem::modules {

KvCacheStore::Caches KvCacheStore::build(BuildContext& context, ValueId k, ValueId v, int layer) const {
  Graph& graph = context.graph;
  const WeightType& stored = context.hardware.of(Role::attention, layer).precision.kv_cache.value;
  TensorType type(stored.dtype, {context.cache.num_blocks, kv_heads_, context.cache.block_size, head_dim_},
                  stored.encoding);
  if (context.num_ranks > 1) type.sharding = Sharding::along(1);
  const ValueId k_cache = graph.add_state(graph.scoped_name("k_cache"), type);
  const ValueId v_cache = graph.add_state(graph.scoped_name("v_cache"), type);
  const std::vector<ValueId> written =
      graph.add(std::make_shared<ops::KvAppend>(), {k, v, context.step.slots, k_cache, v_cache});
  return {written[0], written[1]};
}

}  // namespace eadem::modules
