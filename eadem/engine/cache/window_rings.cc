// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/window_rings.h"

#include <algorithm>

namespace eadem::engine {

WindowRings::WindowRings(const modules::CacheSpec& cache, int64_t rows, int64_t places) {
  if (cache.windows.empty()) return;
  tables_.resize(static_cast<size_t>(rows));
  for (const modules::WindowGroup& group : cache.windows) {
    follows_.push_back(group.num_blocks == cache.num_blocks);
    const int64_t length = follows_.back() ? group.num_blocks : group.num_blocks / rows;
    length_.push_back(length);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<int32_t>& table =
          tables_[static_cast<size_t>(row)].emplace_back(static_cast<size_t>(places), int32_t{-1});
      if (follows_.back() || length == 0) continue;
      for (int64_t place = 0; place < places; ++place)
        table[static_cast<size_t>(place)] = static_cast<int32_t>(row * length + place % length);
    }
  }
}

std::span<const std::vector<int32_t>> WindowRings::tables(int64_t row, std::span<const int32_t> blocks) {
  std::vector<std::vector<int32_t>>& tables = tables_[static_cast<size_t>(row)];
  for (size_t g = 0; g < tables.size(); ++g)
    if (follows_[g]) std::copy_n(blocks.begin(), std::min(blocks.size(), tables[g].size()), tables[g].begin());
  return tables;
}

}  // namespace eadem::engine
