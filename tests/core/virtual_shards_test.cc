// SPDX-License-Identifier: Apache-2.0
//
// Virtual shards: where their borders lie, and in which order sums over them are made, whoever has made the terms.
#include "eadem/core/mesh/virtual_shards.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace eadem {
namespace {

constexpr int kCounts[] = {2, 4, 3};

// What a stack makes of the steps, with parentheses.
std::string written(const std::vector<int>& steps, const std::vector<std::string>& terms) {
  std::vector<std::string> stack;
  for (const int step : steps) {
    if (step != SumTree::kAdd) {
      stack.push_back(terms[static_cast<size_t>(step)]);
      continue;
    }
    const std::string last = stack.back();
    stack.pop_back();
    stack.back() = "(" + stack.back() + "+" + last + ")";
  }
  EXPECT_EQ(stack.size(), 1u);
  return stack.empty() ? "" : stack[0];
}

std::vector<ShardRange> singles(ShardRange range) {
  std::vector<ShardRange> result;
  for (int i = range.begin; i < range.end; ++i) result.push_back({i, i + 1});
  return result;
}

std::vector<std::string> letters(int count) {
  std::vector<std::string> result;
  for (int i = 0; i < count; ++i) result.emplace_back(1, static_cast<char>('a' + i));
  return result;
}

TEST(VirtualShards, LieBetweenTheBordersOfAllRanks) {
  const VirtualShards even = VirtualShards::of(24, kCounts);
  EXPECT_EQ(even.borders, (std::vector<int64_t>{0, 6, 8, 12, 16, 18, 24}));
  EXPECT_EQ(written(even.tree.steps(singles({0, 6})), letters(6)), "((a+(b+c))+((d+e)+f))");
  // 3 ranks have 14, 13 and 13 of 40.
  EXPECT_EQ(VirtualShards::of(40, kCounts).borders, (std::vector<int64_t>{0, 10, 14, 20, 27, 30, 40}));
  EXPECT_EQ(VirtualShards::of(24, std::array{2, 4}).borders, (std::vector<int64_t>{0, 6, 12, 18, 24}));
  const VirtualShards thirds = VirtualShards::of(24, std::array{3});
  EXPECT_EQ(thirds.borders, (std::vector<int64_t>{0, 8, 16, 24}));
  EXPECT_EQ(written(thirds.tree.steps(singles({0, 3})), letters(3)), "((a+b)+c)");
  EXPECT_EQ(VirtualShards::of(24, {}).size(), 1);
  // 5 on 2, 4 and 3 ranks: 3 2; 2 1 1 1; 2 2 1.
  EXPECT_EQ(VirtualShards::of(5, kCounts).borders, (std::vector<int64_t>{0, 2, 3, 4, 5}));
}

TEST(VirtualShards, ARankHasARunOfWholeShards) {
  for (int64_t whole = 4; whole < 200; ++whole) {
    const VirtualShards shards = VirtualShards::of(whole, kCounts);
    for (const int ranks : {1, 2, 3, 4}) {
      int next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const PartRange part = part_of(whole, ranks, rank);
        const ShardRange own = shards.within(part);
        EXPECT_EQ(own.begin, next);
        next = own.end;
        int64_t columns = 0;
        for (int shard = own.begin; shard < own.end; ++shard) columns += shards.range(shard).size;
        EXPECT_EQ(columns, part.size);
        EXPECT_EQ(shards.range(own.begin).begin, part.begin);
      }
      EXPECT_EQ(next, shards.size());
    }
  }
}

// A sum of what the ranks have added up by themselves is the sum of one rank, to the parenthesis.
TEST(VirtualShards, SumsOfRanksAddUpToTheSumOfOne) {
  for (const int64_t whole : {24, 40, 5, 4, 131, 8192}) {
    const VirtualShards shards = VirtualShards::of(whole, kCounts);
    const std::vector<std::string> names = letters(shards.size());
    const std::string one = written(shards.tree.steps(singles({0, shards.size()})), names);
    for (const int ranks : {1, 2, 3, 4}) {
      std::vector<ShardRange> terms;
      std::vector<std::string> sums;
      for (int rank = 0; rank < ranks; ++rank) {
        const ShardRange own = shards.within(part_of(whole, ranks, rank));
        const std::vector<ShardRange> within = shards.tree.sums_within(own);
        if (ranks != 3) {
          EXPECT_EQ(within.size(), 1u) << "what travels from a rank of " << ranks;
        }
        for (const ShardRange& sum : within) {
          terms.push_back(sum);
          sums.push_back(
              written(shards.tree.steps(singles(sum)), {names.begin() + sum.begin, names.begin() + sum.end}));
        }
      }
      EXPECT_EQ(written(shards.tree.steps(terms), sums), one) << whole << " on " << ranks << " ranks";
    }
  }
}

TEST(VirtualShards, DepthOfAStack) {
  EXPECT_EQ(SumTree::depth_of(std::vector{0}), 1);
  const VirtualShards shards = VirtualShards::of(24, kCounts);
  EXPECT_EQ(SumTree::depth_of(shards.tree.steps(singles({0, 6}))), 3);
}

}  // namespace
}  // namespace eadem
