// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/mesh/virtual_shards.h"

#include <algorithm>
#include <map>

#include "eadem/core/error.h"

namespace eadem {

std::vector<ShardRange> SumTree::parts_of(ShardRange range) const {
  const auto first = levels_.begin() + range.begin, last = levels_.begin() + range.end - 1;
  const int lowest = *std::min_element(first, last);
  std::vector<ShardRange> parts;
  int begin = range.begin;
  for (int shard = range.begin; shard < range.end; ++shard)
    if (shard + 1 == range.end || levels_[static_cast<size_t>(shard)] == lowest) {
      parts.push_back({begin, shard + 1});
      begin = shard + 1;
    }
  return parts;
}

void SumTree::collect(ShardRange range, ShardRange own, std::vector<ShardRange>& sums) const {
  if (range.end <= own.begin || own.end <= range.begin) return;
  if (own.begin <= range.begin && range.end <= own.end) {
    sums.push_back(range);
    return;
  }
  for (const ShardRange& part : parts_of(range)) collect(part, own, sums);
}

std::vector<ShardRange> SumTree::sums_within(ShardRange own) const {
  std::vector<ShardRange> sums;
  collect({0, num_shards()}, own, sums);
  return sums;
}

// Appends the steps of `range`, whose terms begin with number `next`, and returns the number after its last term.
size_t SumTree::append_steps(ShardRange range, std::span<const ShardRange> terms, size_t next,
                             std::vector<int>& steps) const {
  EADEM_CHECK(next < terms.size() && terms[next].begin == range.begin && terms[next].end <= range.end,
              "terms of shards {} to {} do not divide the sum", range.begin, range.end);
  if (terms[next] == range) {
    steps.push_back(static_cast<int>(next));
    return next + 1;
  }
  bool adds = false;
  for (const ShardRange& part : parts_of(range)) {
    next = append_steps(part, terms, next, steps);
    if (adds) steps.push_back(kAdd);
    adds = true;
  }
  return next;
}

std::vector<int> SumTree::steps(std::span<const ShardRange> terms) const {
  std::vector<int> result;
  EADEM_CHECK(!terms.empty(), "a sum without terms");
  append_steps({terms.front().begin, terms.back().end}, terms, 0, result);
  return result;
}

int SumTree::depth_of(std::span<const int> steps) {
  int depth = 0, most = 0;
  for (const int step : steps) {
    depth += step == kAdd ? -1 : 1;
    most = std::max(most, depth);
  }
  return most;
}

VirtualShards VirtualShards::of(int64_t whole, std::span<const int> rank_counts) {
  std::map<int64_t, int> level_of;
  for (size_t level = 0; level < rank_counts.size(); ++level)
    for (int rank = 1; rank < rank_counts[level]; ++rank)
      level_of.try_emplace(part_of(whole, rank_counts[level], rank).begin, static_cast<int>(level));
  VirtualShards shards{{0}, {}};
  std::vector<int> levels;
  for (const auto& [border, level] : level_of) {
    shards.borders.push_back(border);
    levels.push_back(level);
  }
  shards.borders.push_back(whole);
  shards.tree = SumTree(std::move(levels));
  return shards;
}

ShardRange VirtualShards::within(PartRange part) const {
  const auto place = [&](int64_t border) {
    const auto found = std::lower_bound(borders.begin(), borders.end(), border);
    EADEM_CHECK(found != borders.end() && *found == border, "no shard begins or ends at {}", border);
    return static_cast<int>(found - borders.begin());
  };
  return {place(part.begin), place(part.begin + part.size)};
}

}  // namespace eadem
