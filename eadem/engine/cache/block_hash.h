// SPDX-License-Identifier: Apache-2.0
//
// BlockHash: a name of a full block of a KV cache. The names of a sequence's blocks are a chain: each is the hash of
// the name before it and of the block's tokens, so that equal names stand for equal tokens from the sequence's first
// one on. The hash has 128 bits and a key that each hasher draws at random: nobody who chooses prompts can make two
// names equal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace eadem::engine {

using BlockHash = std::array<uint64_t, 2>;

// SipHash-2-4 with an output of 128 bits. Source: Aumasson and Bernstein 2012, and their reference code.
BlockHash siphash128(const std::array<uint64_t, 2>& key, std::span<const std::byte> bytes);

class BlockHasher {
 public:
  // Draws a key.
  BlockHasher();
  explicit BlockHasher(const std::array<uint64_t, 2>& key) : key_(key) {}

  // The beginning of a chain. Chains of different salts have no name in common.
  BlockHash root(std::string_view salt) const;
  // The name of a block with these tokens behind the block that is called `before`.
  BlockHash next(const BlockHash& before, std::span<const int32_t> tokens) const;

 private:
  std::array<uint64_t, 2> key_;
};

}  // namespace eadem::engine
