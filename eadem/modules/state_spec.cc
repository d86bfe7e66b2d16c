// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/state_spec.h"

#include <algorithm>

#include "eadem/core/error.h"

namespace eadem::modules {

size_t CacheSpec::group_of(int64_t window) const {
  const auto found =
      std::find_if(windows.begin(), windows.end(), [&](const WindowGroup& group) { return group.window == window; });
  return found == windows.end() ? 0 : 1 + static_cast<size_t>(found - windows.begin());
}

TensorType storage_type(const StateSpec& state, const CacheSpec& cache) {
  std::vector<Dim> dims(state.row.dims().begin(), state.row.dims().end());
  if (state.kind == StateSpec::Kind::per_sequence) {
    dims.insert(dims.begin(), cache.num_slots);
  } else {
    EADEM_CHECK(dims.size() == 2, "state '{}' has rows {}; expected [heads, width]", state.name, to_string(state.row));
    const size_t group = cache.group_of(state.window);
    dims.insert(dims.begin() + 1, (cache.block_size + state.stride - 1) / state.stride);
    dims.insert(dims.begin(), group == 0 ? cache.num_blocks : cache.windows[group - 1].num_blocks + 1);
  }
  TensorType type(state.row.dtype, dims, state.row.encoding);
  // The blocks or slots come before a row's first dimension, and the tokens of a block behind it.
  type.sharding = state.row.sharding;
  if (type.sharding.kind == Sharding::Kind::sharded && state.kind == StateSpec::Kind::per_token &&
      type.sharding.axis > 0)
    ++type.sharding.axis;
  if (type.sharding.kind == Sharding::Kind::sharded) ++type.sharding.axis;
  return type;
}

std::string group_input(const CacheSpec& cache, size_t group, const char* name) {
  return group == 0 ? name : fmt::format("{}_window_{}", name, cache.windows[group - 1].window);
}

}  // namespace eadem::modules
