// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/kv_cache_store.h"

#include "eadem/ops/attention/kv_append.h"
#include "eadem/ops/attention/latent_append.h"

namespace eadem::modules {

ValueId KvCacheStore::add_state(BuildContext& context, const char* name, int64_t width, int layer, bool divided) const {
  const WeightType& stored = context.hardware.of(Role::attention, layer).precision.kv_cache.value;
  TensorType row(stored.dtype, {kv_heads_, width}, stored.encoding);
  if (divided && context.num_ranks > 1) row.sharding = Sharding::along(0);
  return context.add_state({.name = context.graph.scoped_name(name), .row = row, .window = window_});
}

KvValues KvCacheStore::build(BuildContext& context, ValueId k, ValueId v, int layer) const {
  const ValueId k_cache = add_state(context, "k_cache", head_dim_, layer, true),
                v_cache = add_state(context, "v_cache", value_dim_, layer, true);
  const std::vector<ValueId> written =
      context.graph.add(std::make_shared<ops::KvAppend>(), {k, v, context.group_of(window_).slots, k_cache, v_cache});
  return {written[0], written[1]};
}

ValueId KvCacheStore::build_latent(BuildContext& context, ValueId k, int layer) const {
  const ValueId cache = add_state(context, "latent_cache", head_dim_, layer, false);
  return context.graph.add1(std::make_shared<ops::LatentAppend>(), {k, context.group_of(window_).slots, cache});
}

}  // namespace eadem::modules
