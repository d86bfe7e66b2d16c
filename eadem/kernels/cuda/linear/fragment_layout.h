// SPDX-License-Identifier: Apache-2.0
//
// FragmentLayout: where the parts of an encoded weight stand in a block of FragmentBlocks (fragment_blocks.h). Kernels
// get it by value.
//
// A block is 16 rows of a weight and 256 columns, in four pieces of 64 columns, in steps of 16. Lane 4 g + t of the
// warp that decodes a piece holds, of step s and of row g + 8 r, the columns 16 s + 8 h + 2 t + e: the fragment that
// mma.sync reads (instructions/mma.cuh). Column i = 2 h + e of a lane is byte i of a word of four codes.
//   codes       4 bits   u32 [4 pieces][32 lanes][4 steps]: byte i is [ row g + 8 | row g ]
//               6 bits   the low 4 bits so; then the high 2 bits, u32 [4][32][2]: word s / 2, whose byte i has row g of
//                        an even step in bits 0-1, row g + 8 in 2-3, those of an odd step in 4-5 and 6-7
//               8 bits   u32 [4][2 halves][32][2 steps][2 r]: a half is two steps
//               bf16     u32 [4][4 steps][32][4]: the fragments themselves; then a block has nothing else
//   scales      [256 >> scale_shift][16 rows] of scale_type
//   mins        the same, if has_min
//   sub_scales  i8 [256 >> sub_shift][16], if sub_shift > 0
//   sub_mins    u8 [256 >> sub_shift][16], if sub_shift > 0 and has_min
//   zeros       u8 [256 >> scale_shift][16], if has_zeros
#pragma once

#include <cstdint>

namespace eadem::kernels::cuda {

inline constexpr int kFragmentBlockRows = 16;
inline constexpr int kFragmentBlockColumns = 256;
inline constexpr int kFragmentPieceColumns = 64;
inline constexpr int kFragmentPieceSteps = kFragmentPieceColumns / 16;
inline constexpr int kFragmentPieces = kFragmentBlockColumns / kFragmentPieceColumns;

struct FragmentLayout {
  enum class Code : uint8_t { bits4, codebook4, bits6, bits8, bf16 };
  enum class Scale : uint8_t { f16, bf16, f32 };

  Code code = Code::bf16;
  Scale scale_type = Scale::f16;
  bool has_min = false;
  bool has_zeros = false;
  // Columns that share a scale, 32, 64, 128 or 256, and a sub-scale, 16 or 32, as powers of two. sub_shift 0: there are
  // no sub-scales.
  uint8_t scale_shift = 8;
  uint8_t sub_shift = 0;
  // Columns of a group, whose values have one scale and one offset, as far as a piece goes: 16, 32 or 64.
  uint8_t group_shift = 6;
  int8_t known = -1;        // the place in kKnownLayouts, or -1
  int16_t zero = 0;         // subtracted from a code; with has_zeros, each group has its own
  uint32_t levels[4] = {};  // codebook4: level + 128 of each code, four in a word
  // Offsets in bytes within a block.
  int32_t high = 0, scales = 0, mins = 0, sub_scales = 0, sub_mins = 0, zeros = 0;
  int32_t block_bytes = 0;  // a multiple of 16

  friend constexpr bool operator==(const FragmentLayout&, const FragmentLayout&) = default;
};

// Returns a layout with the parts of a block laid out one after another.
constexpr FragmentLayout with_offsets(FragmentLayout layout) {
  using Code = FragmentLayout::Code;
  constexpr int32_t kValues = kFragmentBlockRows * kFragmentBlockColumns;
  const bool coded = layout.code != Code::bf16, sub = layout.sub_shift > 0;
  const int32_t scales = (kFragmentBlockColumns >> layout.scale_shift) * kFragmentBlockRows;
  const int32_t scale_bytes = scales * (layout.scale_type == FragmentLayout::Scale::f32 ? 4 : 2);
  const int32_t sub_scales = (kFragmentBlockColumns >> layout.sub_shift) * kFragmentBlockRows;
  layout.high = !coded ? kValues * 2 : layout.code == Code::bits8 ? kValues : kValues / 2;
  layout.scales = layout.high + (layout.code == Code::bits6 ? kValues / 4 : 0);
  layout.mins = layout.scales + (coded ? scale_bytes : 0);
  layout.sub_scales = layout.mins + (layout.has_min ? scale_bytes : 0);
  layout.sub_mins = layout.sub_scales + (sub ? sub_scales : 0);
  layout.zeros = layout.sub_mins + (sub && layout.has_min ? sub_scales : 0);
  layout.block_bytes = layout.zeros + (layout.has_zeros ? scales : 0);
  const uint8_t group = sub ? layout.sub_shift : layout.scale_shift;
  layout.group_shift = group < 6 ? group : 6;
  return layout;
}

// The layouts for which decoding is compiled by itself; others are decoded by code that reads its layout.
inline constexpr FragmentLayout kKnownLayouts[] = {
    // q4_k, q6_k, q8_0, q4_0
    with_offsets({.code = FragmentLayout::Code::bits4, .has_min = true, .scale_shift = 8, .sub_shift = 5}),
    with_offsets({.code = FragmentLayout::Code::bits6, .scale_shift = 8, .sub_shift = 4, .zero = 32}),
    with_offsets({.code = FragmentLayout::Code::bits8, .scale_shift = 5, .zero = 128}),
    with_offsets({.code = FragmentLayout::Code::bits4, .scale_shift = 5, .zero = 8}),
    // int4_g128_f16, with zero points and without
    with_offsets({.code = FragmentLayout::Code::bits4, .has_zeros = true, .scale_shift = 7}),
    with_offsets({.code = FragmentLayout::Code::bits4, .scale_shift = 7, .zero = 8}),
};
// Places in kKnownLayouts: of q4_k, of q6_k, and of int4_g128_f16 with zero points and without.
inline constexpr int kFourBitLayout = 0, kSixBitLayout = 1, kZeroGroupLayout = 4, kGroupLayout = 5;
inline constexpr int kNumKnownLayouts = sizeof(kKnownLayouts) / sizeof(kKnownLayouts[0]);

// The codes that are multiplied as they are (integer_products.cuh).
enum class IntegerCodes : uint8_t {
  none,
  four,    // q4_k
  six,     // q6_k
  groups,  // of 4 bits, with a scale for each 128 columns or 256, and a zero point
};
inline constexpr int kIntegerGroup = 128;
constexpr IntegerCodes integer_codes_of(const FragmentLayout& layout) {
  if (layout.known == kFourBitLayout) return IntegerCodes::four;
  if (layout.known == kSixBitLayout) return IntegerCodes::six;
  const bool scaled_alone = layout.code == FragmentLayout::Code::bits4 && !layout.has_min && layout.sub_shift == 0;
  return scaled_alone && 1 << layout.scale_shift >= kIntegerGroup ? IntegerCodes::groups : IntegerCodes::none;
}

}  // namespace eadem::kernels::cuda
