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
  int16_t zero = 0;         // subtracted from a code; with has_zeros, each group has its own
  uint32_t levels[4] = {};  // codebook4: level + 128 of each code, four in a word
  // Offsets in bytes within a block.
  int32_t high = 0, scales = 0, mins = 0, sub_scales = 0, sub_mins = 0, zeros = 0;
  int32_t block_bytes = 0;  // a multiple of 16
};

}  // namespace eadem::kernels::cuda
