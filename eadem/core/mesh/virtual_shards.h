// SPDX-License-Identifier: Apache-2.0
//
// Virtual shards: a division of the columns of a product that does not follow from how many ranks there are, and the
// order in which the products of the shards are added. A rank owns a run of whole shards for each of some numbers of
// ranks, so that all of these add the same terms in the same order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eadem/core/mesh/mesh_axis.h"

namespace eadem {

// Shards [begin, end).
struct ShardRange {
  int begin = 0;
  int end = 0;
  int size() const { return end - begin; }
  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

// The order of a sum over shards. Each border between two neighbours has a level. A range of shards is the sum of the
// ranges between its borders of the lowest level, added from the left; a single shard is itself. With levels 1 0 1,
// four shards are (s0 + s1) + (s2 + s3).
class SumTree {
 public:
  SumTree() = default;
  explicit SumTree(std::vector<int> levels) : levels_(std::move(levels)) {}

  int num_shards() const { return static_cast<int>(levels_.size()) + 1; }
  // The largest ranges within `own` that the tree adds up by themselves, in order.
  std::vector<ShardRange> sums_within(ShardRange own) const;
  // A sum as steps of a stack: i pushes term i, kAdd replaces the two values on top by their sum. `terms` divide the
  // whole range, each of them is one that the tree adds up by itself, and they stand in order.
  static constexpr int kAdd = -1;
  std::vector<int> steps(std::span<const ShardRange> terms) const;
  // The most values that such a stack holds.
  static int depth_of(std::span<const int> steps);

 private:
  // The ranges whose sums are added to that of `range`, which has several shards.
  std::vector<ShardRange> parts_of(ShardRange range) const;
  void collect(ShardRange range, ShardRange own, std::vector<ShardRange>& sums) const;
  size_t append_steps(ShardRange range, std::span<const ShardRange> terms, size_t next, std::vector<int>& steps) const;

  std::vector<int> levels_;  // of the border behind each shard but the last
};

struct VirtualShards {
  std::vector<int64_t> borders;  // 0, …, whole: shard i is [borders[i], borders[i + 1])
  SumTree tree;

  // The shards between the borders that `whole` has on any of `rank_counts` ranks (part_of). Borders of an earlier
  // count have the lower level.
  static VirtualShards of(int64_t whole, std::span<const int> rank_counts);

  int size() const { return static_cast<int>(borders.size()) - 1; }
  PartRange range(int shard) const {
    const auto i = static_cast<size_t>(shard);
    return {borders[i], borders[i + 1] - borders[i]};
  }
  // The shards of a part that begins and ends at borders.
  ShardRange within(PartRange part) const;
};

}  // namespace eadem
