// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/cache/block_hash.h"

#include <bit>
#include <cstring>
#include <random>

namespace eadem::engine {

namespace {

struct SipState {
  uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (; count > 0; --count) {
      v0 += v1, v2 += v3;
      v1 = std::rotl(v1, 13) ^ v0, v3 = std::rotl(v3, 16) ^ v2;
      v0 = std::rotl(v0, 32);
      v2 += v1, v0 += v3;
      v1 = std::rotl(v1, 17) ^ v2, v3 = std::rotl(v3, 21) ^ v0;
      v2 = std::rotl(v2, 32);
    }
  }
  void absorb(uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
};

}  // namespace

BlockHash siphash128(const std::array<uint64_t, 2>& key, std::span<const std::byte> bytes) {
  static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");
  SipState state{key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d ^ 0xee, key[0] ^ 0x6c7967656e657261,
                 key[1] ^ 0x7465646279746573};
  size_t at = 0;
  for (uint64_t word = 0; at + sizeof(word) <= bytes.size(); at += sizeof(word)) {
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    state.absorb(word);
  }
  uint64_t last = static_cast<uint64_t>(bytes.size()) << 56;
  for (size_t shift = 0; at < bytes.size(); ++at, shift += 8) last |= std::to_integer<uint64_t>(bytes[at]) << shift;
  state.absorb(last);
  BlockHash hash;
  state.v2 ^= 0xee;
  state.rounds(4);
  hash[0] = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  state.v1 ^= 0xdd;
  state.rounds(4);
  hash[1] = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  return hash;
}

BlockHasher::BlockHasher() {
  std::random_device random;
  for (uint64_t& half : key_) half = uint64_t{random()} << 32 | random();
}

BlockHash BlockHasher::root(std::string_view salt) const {
  return siphash128(key_, std::as_bytes(std::span(salt.data(), salt.size())));
}

// The name before takes the place of the key, which it depends on.
BlockHash BlockHasher::next(const BlockHash& before, std::span<const int32_t> tokens) const {
  return siphash128({before[0] ^ key_[0], before[1] ^ key_[1]}, std::as_bytes(tokens));
}

}  // namespace eadem::engine
