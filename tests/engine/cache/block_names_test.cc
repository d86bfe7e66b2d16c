// SPDX-License-Identifier: Apache-2.0
//
// Names of blocks without a model: the hash, the map from names to blocks, and the order in which a pool gives them
// out.
#include "eadem/engine/cache/block_names.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

#include "eadem/engine/cache/block_hash.h"
#include "eadem/engine/cache/block_pool.h"

namespace eadem::engine {
namespace block_names_test {

std::vector<int32_t> ids(int64_t count, int32_t first = 0) {
  std::vector<int32_t> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

// The first vectors of the reference code (vectors.h, vectors_sip128): messages 00, 01, … under the key 00 … 0f.
TEST(BlockHash, IsSipHash) {
  const std::array<uint64_t, 2> key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
  const std::array<std::byte, 1> zero = {};
  EXPECT_EQ(siphash128(key, {}), (BlockHash{0xe6a825ba047f81a3, 0x930255c71472f66d}));
  EXPECT_EQ(siphash128(key, zero), (BlockHash{0x44af996bd8c187da, 0x45fc229b11597634}));
}

TEST(BlockHash, NamesAreAChainOfOneKeyAndSalt) {
  const BlockHasher hasher, other;
  const std::vector<int32_t> a = ids(4), b = ids(4, 4);
  const BlockHash root = hasher.root("f32");
  EXPECT_EQ(hasher.next(root, a), hasher.next(root, a));
  EXPECT_NE(hasher.next(root, a), hasher.next(root, b));
  EXPECT_NE(hasher.next(hasher.next(root, a), b), hasher.next(hasher.next(root, b), b));
  EXPECT_NE(hasher.next(root, a), hasher.next(hasher.root("int8"), a));
  EXPECT_NE(hasher.root("f32"), other.root("f32"));
}

TEST(BlockNames, EqualAMap) {
  std::mt19937 random(1);
  BlockNames names(37);
  std::map<BlockHash, int32_t> blocks;
  std::map<int32_t, BlockHash> of;
  for (int i = 0; i < 20000; ++i) {
    const auto block = static_cast<int32_t>(random() % 37);
    const BlockHash name = {random() % 8, random() % 8};  // lists are long
    EXPECT_EQ(names.has(block), of.contains(block));
    if (names.has(block)) {
      names.erase(block);
      blocks.erase(of[block]);
      of.erase(block);
    } else {
      const bool is_new = !blocks.contains(name);
      EXPECT_EQ(names.insert(block, name), is_new);
      if (is_new) of[blocks[name] = block] = name;
    }
    const BlockHash asked = {random() % 8, random() % 8};
    const auto found = blocks.find(asked);
    EXPECT_EQ(names.find(asked), found == blocks.end() ? std::nullopt : std::optional(found->second));
    EXPECT_EQ(names.size(), std::ssize(blocks));
  }
  names.clear();
  EXPECT_EQ(names.size(), 0);
}

TEST(BlockPool, GivesOutWhatNobodyWantsAndThenTheLeastRecentlyUsed) {
  BlockPool pool(4);
  for (int32_t block = 0; block < 4; ++block) EXPECT_EQ(pool.take(), block);
  pool.release(2, true);
  pool.release(0, true);
  pool.release(1);
  pool.release(3, true);
  pool.share(0);  // used again
  EXPECT_EQ(pool.num_free(), 3);
  pool.release(0, true);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 2);
  pool.discard(0);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 3);
  EXPECT_EQ(pool.take(), std::nullopt);
}

}  // namespace block_names_test
}  // namespace eadem::engine
