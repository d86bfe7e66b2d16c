// SPDX-License-Identifier: Apache-2.0
//
// Decodes the blocks of FragmentBlocks (fragment_layout.h) to f32. A value differs from its definition by at most one
// rounding of its group's scale and offset to f32, which bf16 hardly ever shows.
//
// Codes become floats without a conversion: the bytes of a code go into the mantissa of a number between 1 and 2.
//   4, 6 bits  v = 1 + code / 2^bits, value = v * factor + offset, of a group: factor = 2^bits scale,
//              offset = -(2^bits + zero) scale - min
//   8 bits     v = 1 + code / 2^15, value = (v - (1 + zero / 2^15)) * (2^15 scale)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/linear/fragment_layout.h"

namespace eadem::kernels::cuda {

// How the values of a group of one row follow from their codes: see above.
struct GroupDecoding {
  float factor, offset;  // of 8 bits, `offset` is 1 + zero / 2^15
};
// The most decodings that a piece has: [64 >> group_shift groups][16 rows], of at most four groups.
inline constexpr int kPieceGroups = 4 * kFragmentBlockRows;

__device__ inline float fragment_scale(const uint8_t* scales, int index, FragmentLayout::Scale type) {
  switch (type) {
    case FragmentLayout::Scale::f16: return __half2float(reinterpret_cast<const __half*>(scales)[index]);
    case FragmentLayout::Scale::bf16: return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(scales)[index]);
    default: return reinterpret_cast<const float*>(scales)[index];
  }
}

// Writes the decodings of the groups of `kPieces` pieces, by a whole warp.
template <FragmentLayout::Code kCode, int kPieces>
__device__ __forceinline__ void decode_groups(const FragmentLayout& f, const uint8_t* block, int first_piece, int lane,
                                              GroupDecoding* groups) {
  using Code = FragmentLayout::Code;
  const int row = lane % kFragmentBlockRows;
  __syncwarp();  // those of earlier pieces are no longer read
#pragma unroll
  for (int g = lane / kFragmentBlockRows; g < kPieces * kFragmentPieceColumns >> f.group_shift; g += 2) {
    const int column = first_piece * kFragmentPieceColumns + (g << f.group_shift);
    const int element = (column >> f.scale_shift) * kFragmentBlockRows + row;
    float scale = fragment_scale(block + f.scales, element, f.scale_type);
    float min = f.has_min ? fragment_scale(block + f.mins, element, f.scale_type) : 0.0f;
    if (f.sub_shift > 0) {
      const int sub = (column >> f.sub_shift) * kFragmentBlockRows + row;
      scale *= static_cast<float>(static_cast<int8_t>(block[f.sub_scales + sub]));
      if (f.has_min) min *= static_cast<float>(block[f.sub_mins + sub]);
    }
    const int zero = f.has_zeros ? block[f.zeros + element] : f.zero;
    GroupDecoding decoding;
    if constexpr (kCode == Code::bits4 || kCode == Code::bits6) {
      constexpr int kOne = kCode == Code::bits4 ? 16 : 64;
      decoding = {scale * static_cast<float>(kOne), -(scale * static_cast<float>(kOne + zero) + min)};
    } else {
      decoding = {scale * 32768.0f, 1.0f + static_cast<float>(zero) / 32768.0f};
    }
    groups[g * kFragmentBlockRows + row] = decoding;
  }
  __syncwarp();
}

// The decodings of a piece.
__host__ __device__ constexpr int groups_of_piece(const FragmentLayout& f) {
  return (kFragmentPieceColumns >> f.group_shift) * kFragmentBlockRows;
}

// Returns the number whose mantissa has byte `i` of `bytes` in its high (kHigh) or middle byte.
template <bool kHigh>
__device__ inline float mantissa_of(uint32_t bytes, int i) {
  // Byte n of the result is byte (selector >> 4 n) of { bytes, 0x3f800000 }. A byte for the high position has bit 7
  // set.
  constexpr uint32_t kOne = 0x3f800000;
  const uint32_t selector = kHigh ? 0x7044u | static_cast<uint32_t>(i) << 8 : 0x7604u | static_cast<uint32_t>(i) << 4;
  return __uint_as_float(__byte_perm(bytes, kOne, selector));
}

// Turns four codes, given in the bytes that mantissa_of reads, into values, and passes them on as
// take(h, value of column 2 t, value of column 2 t + 1).
template <bool kHigh, typename Take>
__device__ inline void decode_codes(uint32_t bytes, const GroupDecoding& group, Take&& take) {
  float value[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float v = mantissa_of<kHigh>(bytes, i);
    value[i] = kHigh ? fmaf(v, group.factor, group.offset) : (v - group.offset) * group.factor;
  }
  take(0, value[0], value[1]);
  take(1, value[2], value[3]);
}

// (value & kMask) | others
template <uint32_t kMask>
__device__ inline uint32_t select_bits(uint32_t value, uint32_t others) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "n"(kMask), "r"(others));
  return result;
}

// The levels + 128 of eight codes of 4 bits: rows[r] has the four of row g + 8 r.
__device__ inline void look_up(uint32_t (&rows)[2], uint32_t codes, const uint32_t (&levels)[4]) {
  uint32_t found[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = half == 0 ? codes : codes >> 16;
    const uint32_t low = __byte_perm(levels[0], levels[1], four & 0x7777u);
    const uint32_t high = __byte_perm(levels[2], levels[3], four & 0x7777u);
    found[half] = __byte_perm(low, high, 0x3210u | (four & 0x8888u) >> 1);
  }
  rows[0] = __byte_perm(found[0], found[1], 0x6420u);
  rows[1] = __byte_perm(found[0], found[1], 0x7531u);
}

// Decodes a piece whose values are codes. Where `f` is a constant, so is all that follows from it.
template <FragmentLayout::Code kCode, typename Take>
__device__ __forceinline__ void decode_coded_piece(const FragmentLayout& f, const uint8_t* block, int piece, int lane,
                                                   const GroupDecoding* groups, Take&& take) {
  using Code = FragmentLayout::Code;
  constexpr bool kBytes = kCode == Code::bits8;
  const uint4* low = reinterpret_cast<const uint4*>(block) + piece * kWarp * (kBytes ? 2 : 1) + lane;
  const uint4 first = low[0], second = kBytes ? low[kWarp] : uint4{};
  uint2 high{};
  if constexpr (kCode == Code::bits6) high = reinterpret_cast<const uint2*>(block + f.high)[piece * kWarp + lane];
  const uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint32_t tops = 0x80808080u;  // of a mantissa's high byte; in a register, so that selecting bits is one instruction
  asm("" : "+r"(tops));
  const GroupDecoding* of_lane = groups + lane / 4;
  GroupDecoding group[2];
#pragma unroll
  for (int s = 0; s < kFragmentPieceSteps; ++s) {
    if (s == 0 || (s << 4 & ((1 << f.group_shift) - 1)) == 0) {
      const GroupDecoding* of_step = of_lane + (s << 4 >> f.group_shift) * kFragmentBlockRows;
      group[0] = of_step[0], group[1] = of_step[8];
    }
    uint32_t rows[2];
    if constexpr (kCode == Code::bits4) {
      rows[0] = select_bits<0x78787878u>(words[s] << 3, tops);
      rows[1] = select_bits<0x78787878u>(words[s] >> 1, tops);
    } else if constexpr (kCode == Code::bits6) {
      const uint32_t two = (s / 2 == 0 ? high.x : high.y) >> s % 2 * 4;
      rows[0] = select_bits<0x1e1e1e1eu>(words[s] << 1, select_bits<0x60606060u>(two << 5, tops));
      rows[1] = select_bits<0x1e1e1e1eu>(words[s] >> 3, select_bits<0x60606060u>(two << 3, tops));
    } else if constexpr (kCode == Code::codebook4) {
      look_up(rows, words[s], f.levels);
    } else {
      rows[0] = words[2 * s], rows[1] = words[2 * s + 1];
    }
    constexpr bool kHigh = kCode == Code::bits4 || kCode == Code::bits6;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      decode_codes<kHigh>(rows[r], group[r], [&](int h, float a, float b) { take(s, r, h, a, b); });
  }
}

// How pieces of a layout are decoded, by a whole warp:
//   prepare<kPieces>(block, first_piece, lane, groups)  writes to `groups` what decoding that many pieces needs
//   decode(block, piece, nth, lane, groups, take)       decodes a piece, the nth of those that were prepared, and
//   passes
//                                                       on what the lane holds as take(step, r, h, value of column
//                                                       16 step + 8 h + 2 t, value of the next column)
// `groups` holds kPieceGroups of this warp's own for each piece. Block and groups may lie in global or shared memory.
template <int kKnown>
struct KnownDecoder {
  template <int kPieces>
  __device__ __forceinline__ void prepare(const uint8_t* block, int first_piece, int lane,
                                          GroupDecoding* groups) const {
    constexpr FragmentLayout kOwn = kKnownLayouts[kKnown];
    decode_groups<kOwn.code, kPieces>(kOwn, block, first_piece, lane, groups);
  }
  template <typename Take>
  __device__ __forceinline__ void decode(const uint8_t* block, int piece, int nth, int lane,
                                         const GroupDecoding* groups, Take&& take) const {
    constexpr FragmentLayout kOwn = kKnownLayouts[kKnown];
    decode_coded_piece<kOwn.code>(kOwn, block, piece, lane, groups + nth * groups_of_piece(kOwn), take);
  }
};
struct AnyDecoder {
  const FragmentLayout& layout;

  template <int kPieces>
  __device__ __forceinline__ void prepare(const uint8_t* block, int first_piece, int lane,
                                          GroupDecoding* groups) const {
    with_code([&](auto code) {
      if constexpr (code.value != FragmentLayout::Code::bf16)
        decode_groups<code.value, kPieces>(layout, block, first_piece, lane, groups);
    });
  }
  template <typename Take>
  __device__ __forceinline__ void decode(const uint8_t* block, int piece, int nth, int lane,
                                         const GroupDecoding* groups, Take&& take) const {
    with_code([&](auto code) {
      if constexpr (code.value != FragmentLayout::Code::bf16)
        decode_coded_piece<code.value>(layout, block, piece, lane, groups + nth * groups_of_piece(layout), take);
      else
        take_fragments(block, piece, lane, take);
    });
  }

 private:
  template <FragmentLayout::Code kCode>
  struct CodeConstant {
    static constexpr FragmentLayout::Code value = kCode;
  };
  template <typename Run>
  __device__ __forceinline__ void with_code(Run&& run) const {
    using Code = FragmentLayout::Code;
    switch (layout.code) {
      case Code::bits4: return run(CodeConstant<Code::bits4>());
      case Code::codebook4: return run(CodeConstant<Code::codebook4>());
      case Code::bits6: return run(CodeConstant<Code::bits6>());
      case Code::bits8: return run(CodeConstant<Code::bits8>());
      case Code::bf16: return run(CodeConstant<Code::bf16>());
    }
  }
  template <typename Take>
  __device__ __forceinline__ static void take_fragments(const uint8_t* block, int piece, int lane, Take&& take) {
    const uint4* fragments = reinterpret_cast<const uint4*>(block) + piece * kFragmentPieceSteps * kWarp + lane;
#pragma unroll
    for (int s = 0; s < kFragmentPieceSteps; ++s) {
      const uint4 word = fragments[s * kWarp];
      const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[i]));
        take(s, i % 2, i / 2, pair.x, pair.y);
      }
    }
  }
};

// Calls run(decoder) with the decoder of a layout.
template <typename Run>
__device__ __forceinline__ void with_decoder(const FragmentLayout& layout, Run&& run) {
  static_assert(kNumKnownLayouts == 6);
  switch (layout.known) {
    case 0: return run(KnownDecoder<0>());
    case 1: return run(KnownDecoder<1>());
    case 2: return run(KnownDecoder<2>());
    case 3: return run(KnownDecoder<3>());
    case 4: return run(KnownDecoder<4>());
    case 5: return run(KnownDecoder<5>());
    default: return run(AnyDecoder{layout});
  }
}

}  // namespace eadem::kernels::cuda
