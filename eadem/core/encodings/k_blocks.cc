// SPDX-License-Identifier: Apache-2.0
//
// The K types: 256 values in groups of 16 or 32, each group with integers that multiply the block's f16 scale and min.
//
//   q2_k   16 x (min 4 bits, scale 4 bits) | 64 bytes of four codes | scale f16 | min f16
//   q3_k   32 bytes of third bits | 64 bytes of four low parts | 16 scales of 6 bits in 12 bytes | scale f16
//   q4_k   scale f16 | min f16 | 8 x (scale 6 bits, min 6 bits) in 12 bytes | 128 bytes of two codes
//   q5_k   as q4_k, with 32 bytes of fifth bits before the codes
//   q6_k   128 bytes of two low parts | 64 bytes of four high parts | 16 signed scales | scale f16
//
// Codes are cut into planes of bits, and a plane is stored run by run: consecutive values lie in consecutive bytes, and
// the next run of values takes the next higher bits of the same bytes.
#include "eadem/core/encodings/block_types.h"

namespace eadem::block_types {

namespace {

constexpr int kSuperBlock = 256;
constexpr int kRun = 32;         // bytes after which a plane goes on in the next higher bits
constexpr int kScaleBytes = 12;  // in q3_k, q4_k and q5_k

// ---- Planes of bits ----------------------------------------------------------------------------------------------

// A run, eight bytes at a time: masks drop what shifts move from byte to byte, and compilers make whole vectors of it.
using RunWords = std::array<uint64_t, kRun / 8>;
RunWords load_run(const uint8_t* bytes) {
  RunWords words;
  std::memcpy(words.data(), bytes, kRun);
  return words;
}
void store_run(uint8_t* bytes, const RunWords& words) { std::memcpy(bytes, words.data(), kRun); }

// Four values in a byte: 128 of them in 32 bytes, so the 256 lie in 64.
void unpack_pairs_of_bits(uint8_t* codes, const uint8_t* bytes) {
  for (int half = 0; half < 2; ++half, codes += 4 * kRun, bytes += kRun) {
    const RunWords packed = load_run(bytes);
#pragma GCC unroll 8
    for (int run = 0; run < 4; ++run) {
      RunWords words;
      for (size_t i = 0; i < words.size(); ++i) words[i] = packed[i] >> (2 * run) & 0x0303030303030303;
      store_run(codes + run * kRun, words);
    }
  }
}
void pack_pairs_of_bits(uint8_t* bytes, const uint8_t* codes) {
  for (int half = 0; half < 2; ++half, codes += 4 * kRun, bytes += kRun)
    for (int i = 0; i < kRun; ++i)
      bytes[i] = static_cast<uint8_t>((codes[i] & 3) | (codes[kRun + i] & 3) << 2 | (codes[2 * kRun + i] & 3) << 4 |
                                      (codes[3 * kRun + i] & 3) << 6);
}

// Bit r of byte i belongs to value 32 r + i; it is bit `position` of that code.
void unpack_single_bits(uint8_t* codes, const uint8_t* bytes, int position) {
  const RunWords packed = load_run(bytes);
#pragma GCC unroll 8
  for (int run = 0; run < 8; ++run) {
    RunWords words = load_run(codes + run * kRun);
    for (size_t i = 0; i < words.size(); ++i) words[i] |= (packed[i] >> run & 0x0101010101010101) << position;
    store_run(codes + run * kRun, words);
  }
}
void pack_single_bits(uint8_t* bytes, const uint8_t* codes, int position) {
  for (int i = 0; i < kRun; ++i) bytes[i] = 0;
  for (int run = 0; run < 8; ++run)
    for (int i = 0; i < kRun; ++i) bytes[i] |= static_cast<uint8_t>((codes[run * kRun + i] >> position & 1) << run);
}

// q4_k and q5_k: the low four bits, 64 values in 32 bytes.
void unpack_runs_of_nibbles(uint8_t* codes, const uint8_t* bytes) {
  for (int i = 0; i < kSuperBlock / 2; i += kRun) unpack_nibbles(codes + 2 * i, bytes + i, kRun);
}
void pack_runs_of_nibbles(uint8_t* bytes, const uint8_t* codes) {
  for (int i = 0; i < kSuperBlock / 2; i += kRun) pack_nibbles(bytes + i, codes + 2 * i, kRun);
}

// ---- Sub-scales ----------------------------------------------------------------------------------------------------

// Six bits each, worked on four bytes at a time; no bit crosses a byte, so the byte order does not matter.
struct FourBytes {
  uint32_t bits;
  static FourBytes load(const void* bytes) {
    FourBytes result;
    std::memcpy(&result.bits, bytes, 4);
    return result;
  }
  void store(void* bytes) const { std::memcpy(bytes, &bits, 4); }
};
constexpr uint32_t kLow2 = 0x03030303, kLow4 = 0x0f0f0f0f, kLow6 = 0x3f3f3f3f;

// q4_k and q5_k. Bytes 0-3: scales 0-3, bytes 4-7: mins 0-3, each with the top two bits of number + 4 above it;
// bytes 8-11: the low four bits of scales 4-7, and above them those of mins 4-7.
void unpack_scales_and_mins(BlockParts& parts, const uint8_t* bytes) {
  const uint32_t scales = FourBytes::load(bytes).bits, mins = FourBytes::load(bytes + 4).bits,
                 lows = FourBytes::load(bytes + 8).bits;
  FourBytes{scales & kLow6}.store(&parts.sub_scales[0]);
  FourBytes{(lows & kLow4) | (scales >> 6 & kLow2) << 4}.store(&parts.sub_scales[4]);
  FourBytes{mins & kLow6}.store(&parts.sub_mins[0]);
  FourBytes{(lows >> 4 & kLow4) | (mins >> 6 & kLow2) << 4}.store(&parts.sub_mins[4]);
}
void pack_scales_and_mins(uint8_t* bytes, const BlockParts& parts) {
  const uint32_t scales0 = FourBytes::load(&parts.sub_scales[0]).bits,
                 scales4 = FourBytes::load(&parts.sub_scales[4]).bits, mins0 = FourBytes::load(&parts.sub_mins[0]).bits,
                 mins4 = FourBytes::load(&parts.sub_mins[4]).bits;
  FourBytes{(scales0 & kLow6) | (scales4 >> 4 & kLow2) << 6}.store(bytes);
  FourBytes{(mins0 & kLow6) | (mins4 >> 4 & kLow2) << 6}.store(bytes + 4);
  FourBytes{(scales4 & kLow4) | (mins4 & kLow4) << 4}.store(bytes + 8);
}

// q3_k, stored plus 32. Bytes 0-7: the low four bits of scales 0-7, and above them those of scales 8-15;
// byte 8 + i: the top two bits of scales i, i + 4, i + 8, i + 12, lowest first.
void unpack_signed_scales(BlockParts& parts, const uint8_t* bytes) {
  const uint32_t lows0 = FourBytes::load(bytes).bits, lows4 = FourBytes::load(bytes + 4).bits,
                 highs = FourBytes::load(bytes + 8).bits;
  FourBytes{(lows0 & kLow4) | (highs & kLow2) << 4}.store(&parts.sub_scales[0]);
  FourBytes{(lows4 & kLow4) | (highs >> 2 & kLow2) << 4}.store(&parts.sub_scales[4]);
  FourBytes{(lows0 >> 4 & kLow4) | (highs >> 4 & kLow2) << 4}.store(&parts.sub_scales[8]);
  FourBytes{(lows4 >> 4 & kLow4) | (highs >> 6 & kLow2) << 4}.store(&parts.sub_scales[12]);
  for (int8_t& scale : parts.sub_scales) scale = static_cast<int8_t>(scale - 32);
}
void pack_signed_scales(uint8_t* bytes, const BlockParts& parts) {
  std::array<uint8_t, 16> scales;
  for (int i = 0; i < 16; ++i) scales[i] = static_cast<uint8_t>(parts.sub_scales[i] + 32);
  const uint32_t scales0 = FourBytes::load(&scales[0]).bits, scales4 = FourBytes::load(&scales[4]).bits,
                 scales8 = FourBytes::load(&scales[8]).bits, scales12 = FourBytes::load(&scales[12]).bits;
  FourBytes{(scales0 & kLow4) | (scales8 & kLow4) << 4}.store(bytes);
  FourBytes{(scales4 & kLow4) | (scales12 & kLow4) << 4}.store(bytes + 4);
  FourBytes{(scales0 >> 4 & kLow2) | (scales4 >> 4 & kLow2) << 2 | (scales8 >> 4 & kLow2) << 4 |
            (scales12 >> 4 & kLow2) << 6}
      .store(bytes + 8);
}

// ---- The types -----------------------------------------------------------------------------------------------------

void unpack_q2_k(BlockParts& parts, const uint8_t* block) {
  const uint8_t *scales = block, *codes = block + 16, *tail = block + 80;
  for (int i = 0; i < 16; ++i) parts.sub_scales[i] = static_cast<int8_t>(scales[i] & 15);
  for (int i = 0; i < 16; ++i) parts.sub_mins[i] = scales[i] >> 4;
  unpack_pairs_of_bits(parts.codes.data(), codes);
  parts.scale = load_f16(tail);
  parts.min = load_f16(tail + 2);
}
void pack_q2_k(uint8_t* block, const BlockParts& parts) {
  for (int i = 0; i < 16; ++i) block[i] = static_cast<uint8_t>((parts.sub_scales[i] & 15) | parts.sub_mins[i] << 4);
  pack_pairs_of_bits(block + 16, parts.codes.data());
  store_f16(block + 80, parts.scale);
  store_f16(block + 82, parts.min);
}

void unpack_q3_k(BlockParts& parts, const uint8_t* block) {
  const uint8_t *third_bits = block, *low_bits = block + 32, *scales = block + 96;
  unpack_pairs_of_bits(parts.codes.data(), low_bits);
  unpack_single_bits(parts.codes.data(), third_bits, 2);
  unpack_signed_scales(parts, scales);
  parts.scale = load_f16(scales + kScaleBytes);
  parts.min = 0;
  parts.sub_mins.fill(1);
}
void pack_q3_k(uint8_t* block, const BlockParts& parts) {
  pack_single_bits(block, parts.codes.data(), 2);
  pack_pairs_of_bits(block + 32, parts.codes.data());
  pack_signed_scales(block + 96, parts);
  store_f16(block + 96 + kScaleBytes, parts.scale);
}

void unpack_q4_k(BlockParts& parts, const uint8_t* block) {
  parts.scale = load_f16(block);
  parts.min = load_f16(block + 2);
  unpack_scales_and_mins(parts, block + 4);
  unpack_runs_of_nibbles(parts.codes.data(), block + 4 + kScaleBytes);
}
void pack_q4_k(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  store_f16(block + 2, parts.min);
  pack_scales_and_mins(block + 4, parts);
  pack_runs_of_nibbles(block + 4 + kScaleBytes, parts.codes.data());
}

void unpack_q5_k(BlockParts& parts, const uint8_t* block) {
  const uint8_t *fifth_bits = block + 4 + kScaleBytes, *low_bits = fifth_bits + 32;
  parts.scale = load_f16(block);
  parts.min = load_f16(block + 2);
  unpack_scales_and_mins(parts, block + 4);
  unpack_runs_of_nibbles(parts.codes.data(), low_bits);
  unpack_single_bits(parts.codes.data(), fifth_bits, 4);
}
void pack_q5_k(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  store_f16(block + 2, parts.min);
  pack_scales_and_mins(block + 4, parts);
  pack_single_bits(block + 4 + kScaleBytes, parts.codes.data(), 4);
  pack_runs_of_nibbles(block + 4 + kScaleBytes + 32, parts.codes.data());
}

// Here the low parts run over 64 bytes: values 0-63 of each 128 in the low halves, 64-127 in the high ones.
void unpack_q6_k(BlockParts& parts, const uint8_t* block) {
  const uint8_t *low_bits = block, *high_bits = block + 128, *scales = block + 192;
  for (int half = 0; half < 2; ++half) unpack_nibbles(parts.codes.data() + 128 * half, low_bits + 64 * half, 64);
  std::array<uint8_t, kSuperBlock> highs;
  unpack_pairs_of_bits(highs.data(), high_bits);
  for (int i = 0; i < kSuperBlock; ++i) parts.codes[i] |= static_cast<uint8_t>(highs[i] << 4);
  std::memcpy(parts.sub_scales.data(), scales, 16);
  parts.scale = load_f16(scales + 16);
  parts.min = 0;
  parts.sub_mins.fill(1);
}
void pack_q6_k(uint8_t* block, const BlockParts& parts) {
  for (int half = 0; half < 2; ++half) pack_nibbles(block + 64 * half, parts.codes.data() + 128 * half, 64);
  std::array<uint8_t, kSuperBlock> highs;
  for (int i = 0; i < kSuperBlock; ++i) highs[i] = parts.codes[i] >> 4;
  pack_pairs_of_bits(block + 128, highs.data());
  std::memcpy(block + 192, parts.sub_scales.data(), 16);
  store_f16(block + 208, parts.scale);
}

constexpr BlockFormat kQ2K = {.name = "q2_k",
                              .block_size = kSuperBlock,
                              .block_bytes = 84,
                              .group_size = 16,
                              .code_bits = 2,
                              .zero = 0,
                              .sub_scale_min = 0,
                              .sub_scale_max = 15,
                              .has_min = true,
                              .sub_min_max = 15,
                              .scale_at = 80};
constexpr BlockFormat kQ3K = {.name = "q3_k",
                              .block_size = kSuperBlock,
                              .block_bytes = 110,
                              .group_size = 16,
                              .code_bits = 3,
                              .zero = 4,
                              .sub_scale_min = -32,
                              .sub_scale_max = 31,
                              .scale_at = 108};
constexpr BlockFormat kQ4K = {.name = "q4_k",
                              .block_size = kSuperBlock,
                              .block_bytes = 144,
                              .group_size = 32,
                              .code_bits = 4,
                              .zero = 0,
                              .sub_scale_min = 0,
                              .sub_scale_max = 63,
                              .has_min = true,
                              .sub_min_max = 63,
                              .scale_at = 0};
constexpr BlockFormat kQ5K = {.name = "q5_k",
                              .block_size = kSuperBlock,
                              .block_bytes = 176,
                              .group_size = 32,
                              .code_bits = 5,
                              .zero = 0,
                              .sub_scale_min = 0,
                              .sub_scale_max = 63,
                              .has_min = true,
                              .sub_min_max = 63,
                              .scale_at = 0};
constexpr BlockFormat kQ6K = {.name = "q6_k",
                              .block_size = kSuperBlock,
                              .block_bytes = 210,
                              .group_size = 16,
                              .code_bits = 6,
                              .zero = 32,
                              .sub_scale_min = -128,
                              .sub_scale_max = 127,
                              .scale_at = 208};

}  // namespace

constinit const BlockEncoding q2_k(kQ2K, unpack_q2_k, pack_q2_k);
constinit const BlockEncoding q3_k(kQ3K, unpack_q3_k, pack_q3_k);
constinit const BlockEncoding q4_k(kQ4K, unpack_q4_k, pack_q4_k);
constinit const BlockEncoding q5_k(kQ5K, unpack_q5_k, pack_q5_k);
constinit const BlockEncoding q6_k(kQ6K, unpack_q6_k, pack_q6_k);

}  // namespace eadem::block_types
