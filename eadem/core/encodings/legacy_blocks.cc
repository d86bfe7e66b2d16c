// SPDX-License-Identifier: Apache-2.0
//
// The types of 32 values with one scale, and with one offset where the name ends in _1:
//
//   q4_0   scale f16 | 16 bytes of two codes
//   q4_1   scale f16 | offset f16 | 16 bytes of two codes
//   q5_0   scale f16 | 32 fifth bits, value 0 lowest | 16 bytes of two codes
//   q5_1   scale f16 | offset f16 | 32 fifth bits | 16 bytes of two codes
//   q8_0   scale f16 | 32 signed bytes
//
// Byte i of the codes holds value i in its low half and value i + 16 in its high half. The offset is added to a value,
// so it is the negative of BlockParts::min.
#include "eadem/core/encodings/block_types.h"

namespace eadem::block_types {

namespace {

constexpr int kSize = 32;

// Bit i of the four bytes is the fifth bit of code i. Eight codes at a time, the first one lowest: of copies of a byte
// each keeps its own bit, which a sum without carries moves to the top.
void unpack_fifth_bits(uint8_t* codes, const uint8_t* bytes) {
  constexpr uint64_t kOnes = 0x0101010101010101, kBits = 0x8040201008040201;
  for (int byte = 0; byte < 4; ++byte) {
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * byte, 8);
    eight |= (((bytes[byte] * kOnes & kBits) + 0x7f * kOnes) >> 7 & kOnes) << 4;
    std::memcpy(codes + 8 * byte, &eight, 8);
  }
}
void pack_fifth_bits(uint8_t* bytes, const uint8_t* codes) {
  for (int byte = 0; byte < 4; ++byte) {
    bytes[byte] = 0;
    for (int bit = 0; bit < 8; ++bit) bytes[byte] |= static_cast<uint8_t>((codes[8 * byte + bit] >> 4 & 1) << bit);
  }
}

void unpack_q4_0(BlockParts& parts, const uint8_t* block) {
  set_scale_only(parts, load_f16(block));
  unpack_nibbles(parts.codes.data(), block + 2, kSize / 2);
}
void pack_q4_0(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  pack_nibbles(block + 2, parts.codes.data(), kSize / 2);
}

void unpack_q4_1(BlockParts& parts, const uint8_t* block) {
  set_scale_only(parts, load_f16(block));
  parts.min = -load_f16(block + 2);
  unpack_nibbles(parts.codes.data(), block + 4, kSize / 2);
}
void pack_q4_1(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  store_f16(block + 2, -parts.min);
  pack_nibbles(block + 4, parts.codes.data(), kSize / 2);
}

void unpack_q5_0(BlockParts& parts, const uint8_t* block) {
  set_scale_only(parts, load_f16(block));
  unpack_nibbles(parts.codes.data(), block + 6, kSize / 2);
  unpack_fifth_bits(parts.codes.data(), block + 2);
}
void pack_q5_0(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  pack_fifth_bits(block + 2, parts.codes.data());
  pack_nibbles(block + 6, parts.codes.data(), kSize / 2);
}

void unpack_q5_1(BlockParts& parts, const uint8_t* block) {
  set_scale_only(parts, load_f16(block));
  parts.min = -load_f16(block + 2);
  unpack_nibbles(parts.codes.data(), block + 8, kSize / 2);
  unpack_fifth_bits(parts.codes.data(), block + 4);
}
void pack_q5_1(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  store_f16(block + 2, -parts.min);
  pack_fifth_bits(block + 4, parts.codes.data());
  pack_nibbles(block + 8, parts.codes.data(), kSize / 2);
}

// A code is the signed byte plus 128.
void unpack_q8_0(BlockParts& parts, const uint8_t* block) {
  set_scale_only(parts, load_f16(block));
  for (int i = 0; i < kSize; ++i) parts.codes[i] = block[2 + i] ^ 0x80;
}
void pack_q8_0(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  for (int i = 0; i < kSize; ++i) block[2 + i] = parts.codes[i] ^ 0x80;
}

constexpr BlockFormat legacy(std::string_view name, int block_bytes, int code_bits, int zero, bool has_min) {
  return {.name = name,
          .block_size = kSize,
          .block_bytes = block_bytes,
          .group_size = kSize,
          .code_bits = code_bits,
          .zero = zero,
          .has_min = has_min,
          .scale_at = 0};
}

}  // namespace

constinit const BlockEncoding q4_0(legacy("q4_0", 18, 4, 8, false), unpack_q4_0, pack_q4_0);
constinit const BlockEncoding q4_1(legacy("q4_1", 20, 4, 0, true), unpack_q4_1, pack_q4_1);
constinit const BlockEncoding q5_0(legacy("q5_0", 22, 5, 16, false), unpack_q5_0, pack_q5_0);
constinit const BlockEncoding q5_1(legacy("q5_1", 24, 5, 0, true), unpack_q5_1, pack_q5_1);
constinit const BlockEncoding q8_0(legacy("q8_0", 34, 8, 128, false), unpack_q8_0, pack_q8_0);

}  // namespace eadem::block_types
