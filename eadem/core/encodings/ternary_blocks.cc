// SPDX-License-Identifier: Apache-2.0
//
// The types of -1, 0 and 1 (tq2_0: and 2), all 256 values of a block with one scale:
//
//   tq1_0  240 values, five in a byte: 32 bytes, then 16 | 16 values, four in a byte: 4 bytes | scale f16
//   tq2_0  four values of 2 bits in a byte, run by run as in the K types: 64 bytes | scale f16
//
// In tq1_0 a byte b is ceil(256 n / 243) for the number n of five digits of base 3, so the digit after i steps is what
// a product carries out of the byte: (b * 3^i mod 256) * 3 / 256.
#include "eadem/core/encodings/block_types.h"

namespace eadem::block_types {

namespace {

// Digit `digit` of all `num_bytes` bytes, for each of `num_digits` digits in turn.
uint8_t* unpack_digits(uint8_t* codes, const uint8_t* bytes, int num_bytes, int num_digits) {
  uint32_t power = 1;
  for (int digit = 0; digit < num_digits; ++digit, power *= 3, codes += num_bytes)
    for (int i = 0; i < num_bytes; ++i) codes[i] = static_cast<uint8_t>((bytes[i] * power & 255) * 3 >> 8);
  return codes;
}

void set_ternary_scale(BlockParts& parts, float scale) {
  parts.scale = scale;
  parts.min = 0;
  parts.sub_scales.fill(1);
  parts.sub_mins.fill(1);
}

void unpack_tq1_0(BlockParts& parts, const uint8_t* block) {
  set_ternary_scale(parts, load_f16(block + 52));
  uint8_t* codes = unpack_digits(parts.codes.data(), block, 32, 5);
  codes = unpack_digits(codes, block + 32, 16, 5);
  unpack_digits(codes, block + 48, 4, 4);
}
void store_scale_tq1_0(uint8_t* block, float scale) { store_f16(block + 52, scale); }

void unpack_tq2_0(BlockParts& parts, const uint8_t* block) {
  set_ternary_scale(parts, load_f16(block + 64));
  for (int half = 0; half < 2; ++half)
    for (int run = 0; run < 4; ++run)
      for (int i = 0; i < 32; ++i)
        parts.codes[static_cast<size_t>(128 * half + 32 * run + i)] = block[32 * half + i] >> (2 * run) & 3;
}
void store_scale_tq2_0(uint8_t* block, float scale) { store_f16(block + 64, scale); }

// Products want sub-scales for codes of 2 bits: ones.
constexpr BlockFormat ternary_format(std::string_view name, int block_bytes) {
  return {.name = name,
          .block_size = 256,
          .block_bytes = block_bytes,
          .group_size = 16,
          .code_bits = 2,
          .zero = 1,
          .scale_at = block_bytes - 2};
}
constexpr BlockFormat kTq10 = ternary_format("tq1_0", 54);
constexpr BlockFormat kTq20 = ternary_format("tq2_0", 66);

}  // namespace

constinit const BlockEncoding tq1_0(kTq10, unpack_tq1_0, store_scale_tq1_0);
constinit const BlockEncoding tq2_0(kTq20, unpack_tq2_0, store_scale_tq2_0);

}  // namespace eadem::block_types
