// SPDX-License-Identifier: Apache-2.0
//
// The IQ1, IQ2 and IQ3 types: 256 values in runs of 8 (IQ3: 4) neighbours. The magnitudes of a run are a word of a
// table, grid_tables.h; signs and the number of the word are what the file stores.
//
//   iq2_xxs  scale f16 | 8 groups of 32: 4 numbers of 8 bits | 4 signs of 7 bits, sub-scale of 4 bits
//   iq2_xs   scale f16 | 32 x (number 9 bits, signs 7 bits) | 16 sub-scales of 4 bits
//   iq2_s    scale f16 | 32 x low 8 bits of the numbers | 32 signs of 8 bits | 32 x top 2 bits | 16 sub-scales of 4
//   bits iq3_xxs  scale f16 | 64 numbers of 8 bits | 8 groups of 32: 4 signs of 7 bits, sub-scale of 4 bits iq3_s scale
//   f16 | 64 x low 8 bits | 64 x top bit | 32 signs of 8 bits | 8 sub-scales of 4 bits iq1_s    scale f16 | 32 x low 8
//   bits | 8 groups of 32: 4 x top 3 bits, sub-scale of 3 bits, shift of 1 bit iq1_m    32 x low 8 bits | 32 x (top 3
//   bits, shift of 1 bit) | 4 x (4 sub-scales of 3 bits, 4 bits of the f16 scale)
//
// Sub-scales count in odd numbers: stored s means 2 s + 1. Seven bits of signs have an eighth that makes their number
// even. In IQ1 a level is -1, 0 or 1, moved by an eighth: up, or down where the shift is set.
//
// A code is the number of a level and above it, in the highest bit, whether it is negative (IQ1: moved down).
#include <bit>

#include "eadem/core/encodings/block_types.h"
#include "eadem/core/encodings/grid_tables.h"

namespace eadem::block_types {

namespace {

constexpr int kGridBlock = 256, kRunLevels = 8;

uint32_t load_u16(const uint8_t* bytes) { return static_cast<uint32_t>(bytes[0] | bytes[1] << 8); }
uint32_t load_u32(const uint8_t* bytes) { return load_u16(bytes) | load_u16(bytes + 2) << 16; }

// ---- Runs of eight codes, one to a byte
// ------------------------------------------------------------------------------

// Eight fields of `kBits` bits each, moved to the bytes of a word: halves, quarters and eighths part in turn.
template <int kBits>
uint64_t eight_bytes_of(uint32_t fields) {
  constexpr uint64_t kField = (1u << kBits) - 1, kPair = kField | kField << kBits, kFour = kPair | kPair << (2 * kBits);
  uint64_t word = fields;
  word = (word | word << (32 - 4 * kBits)) & (kFour << 32 | kFour);
  word = (word | word << (16 - 2 * kBits)) & (kPair * 0x0001000100010001u);
  return (word | word << (8 - kBits)) & (kField * 0x0101010101010101u);
}

void store_eight(uint8_t* codes, uint64_t bytes) { std::memcpy(codes, &bytes, kRunLevels); }

// IQ1 and IQ2: codes of 3 bits.
void unpack_run(uint8_t* codes, uint16_t levels, uint32_t signs) {
  store_eight(codes, eight_bytes_of<2>(levels) | eight_bytes_of<1>(signs) << 2);
}
// IQ3: codes of 4 bits, from two words of the table.
void unpack_run(uint8_t* codes, uint16_t first, uint16_t second, uint32_t signs) {
  store_eight(codes, eight_bytes_of<4>(first | static_cast<uint32_t>(second) << 16) | eight_bytes_of<1>(signs) << 3);
}

// All eight signs of stored seven.
uint32_t with_eighth(uint32_t seven) {
  seven &= 127;
  return seven | static_cast<uint32_t>(std::popcount(seven) & 1) << 7;
}

int8_t odd(uint32_t stored) { return static_cast<int8_t>(2 * stored + 1); }

void set_grid_scale(BlockParts& parts, float scale, const BlockFormat& format) {
  parts.scale = scale * format.scale_unit;
  parts.min = 0;
  parts.sub_mins.fill(1);
}
// Sub-scales of 4 bits, two in a byte, for a format's groups.
void unpack_sub_scales(BlockParts& parts, const uint8_t* bytes, const BlockFormat& format) {
  for (int g = 0; g < format.num_groups(); ++g)
    parts.sub_scales[static_cast<size_t>(g)] = odd(bytes[g / 2] >> (4 * (g % 2)) & 15);
}

// ---- IQ2
// -------------------------------------------------------------------------------------------------------------

constexpr int8_t kIq2Levels[8] = {8, 25, 43, 0, -8, -25, -43, 0};

constexpr BlockFormat iq2_format(std::string_view name, int block_bytes, int group_size) {
  return {.name = name,
          .block_size = kGridBlock,
          .block_bytes = block_bytes,
          .group_size = group_size,
          .code_bits = 3,
          .zero = 0,
          .scale_unit = 0.125f,
          .sub_scale_min = 1,
          .sub_scale_max = 31,
          .codebook = kIq2Levels,
          .scale_at = 0};
}
constexpr BlockFormat kIq2Xxs = iq2_format("iq2_xxs", 66, 32);
constexpr BlockFormat kIq2Xs = iq2_format("iq2_xs", 74, 16);
constexpr BlockFormat kIq2S = iq2_format("iq2_s", 82, 16);

void unpack_iq2_xxs(BlockParts& parts, const uint8_t* block) {
  set_grid_scale(parts, load_f16(block), kIq2Xxs);
  for (int group = 0; group < 8; ++group) {
    const uint8_t* numbers = block + 2 + 8 * group;
    const uint32_t tail = load_u32(numbers + 4);
    parts.sub_scales[static_cast<size_t>(group)] = odd(tail >> 28);
    for (int run = 0; run < 4; ++run)
      unpack_run(parts.codes.data() + 32 * group + kRunLevels * run, kIq2XxsGrid[numbers[run]],
                 with_eighth(tail >> (7 * run)));
  }
}

void unpack_iq2_xs(BlockParts& parts, const uint8_t* block) {
  set_grid_scale(parts, load_f16(block), kIq2Xs);
  unpack_sub_scales(parts, block + 66, kIq2Xs);
  for (int run = 0; run < 32; ++run) {
    const uint32_t word = load_u16(block + 2 + 2 * run);
    unpack_run(parts.codes.data() + kRunLevels * run, kIq2XsGrid[word & 511], with_eighth(word >> 9));
  }
}

void unpack_iq2_s(BlockParts& parts, const uint8_t* block) {
  const uint8_t *lows = block + 2, *signs = block + 34, *tops = block + 66;
  set_grid_scale(parts, load_f16(block), kIq2S);
  unpack_sub_scales(parts, block + 74, kIq2S);
  for (int run = 0; run < 32; ++run) {
    const uint32_t top = tops[run / 4] >> (2 * (run % 4)) & 3;
    unpack_run(parts.codes.data() + kRunLevels * run, kIq2SGrid[lows[run] | top << 8], signs[run]);
  }
}

// ---- IQ3
// -------------------------------------------------------------------------------------------------------------

constexpr int8_t kIq3XxsLevels[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
constexpr int8_t kIq3SLevels[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

constexpr BlockFormat iq3_format(std::string_view name, int block_bytes, const int8_t* levels, float scale_unit) {
  return {.name = name,
          .block_size = kGridBlock,
          .block_bytes = block_bytes,
          .group_size = 32,
          .code_bits = 4,
          .zero = 0,
          .scale_unit = scale_unit,
          .sub_scale_min = 1,
          .sub_scale_max = 31,
          .codebook = levels,
          .scale_at = 0};
}
constexpr BlockFormat kIq3Xxs = iq3_format("iq3_xxs", 98, kIq3XxsLevels, 0.25f);
constexpr BlockFormat kIq3S = iq3_format("iq3_s", 110, kIq3SLevels, 1);

void unpack_iq3_xxs(BlockParts& parts, const uint8_t* block) {
  const uint8_t *numbers = block + 2, *tails = block + 66;
  set_grid_scale(parts, load_f16(block), kIq3Xxs);
  for (int group = 0; group < 8; ++group) {
    const uint32_t tail = load_u32(tails + 4 * group);
    parts.sub_scales[static_cast<size_t>(group)] = odd(tail >> 28);
    for (int run = 4 * group; run < 4 * group + 4; ++run)
      unpack_run(parts.codes.data() + kRunLevels * run, kIq3XxsGrid[numbers[2 * run]],
                 kIq3XxsGrid[numbers[2 * run + 1]], with_eighth(tail >> (7 * (run % 4))));
  }
}

void unpack_iq3_s(BlockParts& parts, const uint8_t* block) {
  const uint8_t *lows = block + 2, *tops = block + 66, *signs = block + 74;
  set_grid_scale(parts, load_f16(block), kIq3S);
  unpack_sub_scales(parts, block + 106, kIq3S);
  for (int run = 0; run < 32; ++run) {
    const int i = 2 * run;
    const uint32_t top = static_cast<uint32_t>(tops[i / 8]) >> (i % 8);
    unpack_run(parts.codes.data() + kRunLevels * run, kIq3SGrid[lows[i] | (top & 1) << 8],
               kIq3SGrid[lows[i + 1] | (top >> 1 & 1) << 8], signs[run]);
  }
}

// ---- IQ1
// -------------------------------------------------------------------------------------------------------------

// Eighths: 8 level + 1, and 8 level - 1.
constexpr int8_t kIq1Levels[8] = {-7, 1, 9, 0, -9, -1, 7, 0};

constexpr BlockFormat iq1_format(std::string_view name, int block_bytes, int group_size, int scale_at) {
  return {.name = name,
          .block_size = kGridBlock,
          .block_bytes = block_bytes,
          .group_size = group_size,
          .code_bits = 3,
          .zero = 0,
          .scale_unit = 0.125f,
          .sub_scale_min = 1,
          .sub_scale_max = 15,
          .codebook = kIq1Levels,
          .scale_at = scale_at};
}
constexpr BlockFormat kIq1S = iq1_format("iq1_s", 50, 32, 0);
constexpr BlockFormat kIq1M = iq1_format("iq1_m", 56, 16, -1);

void unpack_iq1_s(BlockParts& parts, const uint8_t* block) {
  const uint8_t *lows = block + 2, *tails = block + 34;
  set_grid_scale(parts, load_f16(block), kIq1S);
  for (int group = 0; group < 8; ++group) {
    const uint32_t tail = load_u16(tails + 2 * group), shifts = tail >> 15 != 0 ? 255 : 0;
    parts.sub_scales[static_cast<size_t>(group)] = odd(tail >> 12 & 7);
    for (int run = 4 * group; run < 4 * group + 4; ++run)
      unpack_run(parts.codes.data() + kRunLevels * run, kIq1Grid[lows[run] | (tail >> (3 * (run % 4)) & 7) << 8],
                 shifts);
  }
}

void unpack_iq1_m(BlockParts& parts, const uint8_t* block) {
  const uint8_t *lows = block, *tops = block + 32, *words = block + 48;
  uint32_t scale = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = load_u16(words + 2 * i);
    scale |= word >> 12 << (4 * i);
    for (int g = 0; g < 4; ++g) parts.sub_scales[static_cast<size_t>(4 * i + g)] = odd(word >> (3 * g) & 7);
  }
  set_grid_scale(parts, f16_t{static_cast<uint16_t>(scale)}.to_float(), kIq1M);
  for (int run = 0; run < 32; ++run) {
    const uint32_t top = static_cast<uint32_t>(tops[run / 2]) >> (4 * (run % 2));
    unpack_run(parts.codes.data() + kRunLevels * run, kIq1Grid[lows[run] | (top & 7) << 8], (top & 8) != 0 ? 255 : 0);
  }
}
void store_scale_iq1_m(uint8_t* block, float scale) {
  const uint32_t bits = f16_t::from_float(scale).bits;
  for (int i = 0; i < 4; ++i) {
    uint8_t& high = block[48 + 2 * i + 1];
    high = static_cast<uint8_t>((high & 15) | (bits >> (4 * i) & 15) << 4);
  }
}

}  // namespace

constinit const BlockEncoding iq1_s(kIq1S, unpack_iq1_s, store_f16);
constinit const BlockEncoding iq1_m(kIq1M, unpack_iq1_m, store_scale_iq1_m);
constinit const BlockEncoding iq2_xxs(kIq2Xxs, unpack_iq2_xxs, store_f16);
constinit const BlockEncoding iq2_xs(kIq2Xs, unpack_iq2_xs, store_f16);
constinit const BlockEncoding iq2_s(kIq2S, unpack_iq2_s, store_f16);
constinit const BlockEncoding iq3_xxs(kIq3Xxs, unpack_iq3_xxs, store_f16);
constinit const BlockEncoding iq3_s(kIq3S, unpack_iq3_s, store_f16);

}  // namespace eadem::block_types
