// SPDX-License-Identifier: Apache-2.0
//
// The types of weights that the kernel is compiled for: 4 bits in groups, K-quants, floats of 8 bits, and bf16. Each
// says how large the slots of the ring are, how many terms a row has, and how many bytes an input takes; the first two
// also what a product needs of the sums of an activation's codes, and what a term is, which float_products.cuh and
// bf16_products.cuh say of the others.
#pragma once

#include "eadem/kernels/cuda/decoder/place.cuh"
#include "eadem/kernels/cuda/linear/integer_products.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// A lane's fragments of the codes of a chunk: of piece i, those at 4 i + lane % 4 of `codes`.
__device__ inline uint4 fragment_of(const uint8_t* codes, int piece, int lane) {
  return reinterpret_cast<const uint4*>(codes)[piece * 4 + lane % 4];
}

// 4 bits with a scale of type Scale for each 128 columns, and zero points or none.
template <typename Scale, bool kHasZeros>
struct Groups {
  static constexpr FragmentLayout kLayout = kKnownLayouts[kHasZeros ? kZeroGroupLayout : kGroupLayout];
  static constexpr int kSlots = 11, kSlotBytes = kProductWarps * kKnownLayouts[kZeroGroupLayout].block_bytes,
                       kMostWindow = kSlotParts * kSlots;
  static constexpr int kInputBytes = 1;
  static constexpr bool kHasSixBits = false, kIsFloat = false, kIsBf16 = false;
  __host__ __device__ static constexpr int terms_of(int columns) { return columns / kColumns; }
  __device__ static constexpr int block_bytes(bool /*six*/) { return kLayout.block_bytes; }

  // The sums of the codes of each half of a chunk. All lanes have the same.
  struct Sums {
    int half[2];

    Sums() = default;
    // Called by a warp. `sum`: of the eight codes that the lane has.
    __device__ Sums(int sum, int lane)
        : half{__reduce_add_sync(kAllLanes, lane < 16 ? sum : 0), __reduce_add_sync(kAllLanes, lane < 16 ? 0 : sum)} {}
    __device__ void store(uint32_t (&to)[kSumWords], int lane) const {
      if (lane == 0) to[0] = static_cast<uint32_t>(half[0]), to[1] = static_cast<uint32_t>(half[1]);
    }
    __device__ void load(const uint32_t (&from)[kSumWords], int /*lane*/) {
      half[0] = static_cast<int>(from[0]), half[1] = static_cast<int>(from[1]);
    }
  };

  // What a lane multiplies blocks by.
  struct Factors {
    uint4 b[kFragmentPieces];
    Sums sums;

    // `codes`: of a chunk, in shared memory.
    __device__ void set_codes(const uint8_t* codes, int lane) {
#pragma unroll
      for (int piece = 0; piece < kFragmentPieces; ++piece) b[piece] = fragment_of(codes, piece, lane);
    }
  };

  // By a warp: the terms of rows g and g + 8 of a block, in lanes 4 g.
  template <bool kSix>
  __device__ static float2 multiply(const uint8_t* block, const Factors& x, int lane) {
    constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
    uint4 w[kFragmentPieces];
#pragma unroll
    for (int piece = 0; piece < kFragmentPieces; ++piece)
      w[piece] = reinterpret_cast<const uint4*>(block)[piece * kWarp + lane];
    // [2 halves][16 rows]
    const auto* scales = reinterpret_cast<const Scale*>(block + kLayout.scales) + lane / 4;
    const uint8_t* zeros = block + kLayout.zeros + lane / 4;
    // A sum begins with minus the zero point times the sum of x's codes, which subtracts the zero point from each code
    // of the weight. Codes of row g + 8 stay in the high bits of their bytes, and so are times 16.
    int sums[2][4];  // by half
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int zero0 = kHasZeros ? zeros[half * kTileRows] : kLayout.zero;
      const int zero1 = kHasZeros ? zeros[half * kTileRows + 8] : kLayout.zero;
      sums[half][0] = sums[half][1] = -zero0 * x.sums.half[half];
      sums[half][2] = sums[half][3] = -16 * zero1 * x.sums.half[half];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // two chains take turns
        const uint4 a = w[2 * half + i], b = x.b[2 * half + i];
        mma(sums[half], {a.x & kLow, a.x & kHigh, a.y & kLow, a.y & kHigh}, b.x, b.y);
        mma(sums[half], {a.z & kLow, a.z & kHigh, a.w & kLow, a.w & kHigh}, b.z, b.w);
      }
    const auto term = [](int half0, int half1, float factor, float by0, float by1) {
      return fmaf(static_cast<float>(half1) * factor, by1, __fmul_rn(static_cast<float>(half0) * factor, by0));
    };
    const auto scale_of = [&](int half, int row) { return load(scales + half * kTileRows + row); };
    return {term(sums[0][0], sums[1][0], of_row(0), scale_of(0, 0), scale_of(1, 0)),
            term(sums[0][2], sums[1][2], of_row(1), scale_of(0, 8), scale_of(1, 8))};
  }
};

// q4_k and q6_k, of which each weight of a layer is one. Blocks of q6_k lie in two slots, four in each.
struct KQuants {
  static constexpr int kSlots = 10, kSlotBytes = kProductWarps * kFourBits.block_bytes,
                       kMostWindow = kSlotParts * kSlots;
  static constexpr int kInputBytes = 1;
  static constexpr bool kHasSixBits = true, kIsFloat = false, kIsBf16 = false;
  __host__ __device__ static constexpr int terms_of(int columns) { return columns / kColumns; }
  __device__ static constexpr int block_bytes(bool six) { return six ? kSixBits.block_bytes : kFourBits.block_bytes; }

  // The sums of the codes of 16 columns each, as f16 times 2^-12. A word has two of them: those of lane 4 g + t are of
  // columns 32 t to 32 t + 31, and of the columns 128 further.
  struct Sums {
    uint32_t words[2];

    Sums() = default;
    __device__ Sums(int sum, int lane) {
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      const float scaled = static_cast<float>(sum) * 0x1p-12f, next = __shfl_down_sync(kAllLanes, scaled, 2);
      const uint32_t pair = bits_of(__floats2half2_rn(scaled, next));
#pragma unroll
      for (int i = 0; i < 2; ++i) words[i] = __shfl_sync(kAllLanes, pair, lane % 4 * 4 + i * 16);
    }
    __device__ void store(uint32_t (&to)[kSumWords], int lane) const {
      if (lane < 4) to[lane] = words[0], to[lane + 4] = words[1];
    }
    __device__ void load(const uint32_t (&from)[kSumWords], int lane) {
      words[0] = from[lane % 4], words[1] = from[lane % 4 + 4];
    }
  };

  // What a lane multiplies blocks by. Codes are loaded for each block, as registers for them are more than there are.
  struct Factors {
    const uint8_t* codes;
    Sums sums;

    __device__ void set_codes(const uint8_t* of_chunk, int /*lane*/) { codes = of_chunk; }
  };

  // By a warp: the terms of rows g and g + 8 of a block, in lanes 4 g.
  template <bool kSix>
  __device__ static float2 multiply(const uint8_t* block, const Factors& x, int lane) {
    IntegerTokens<1> tokens;
#pragma unroll
    for (int piece = 0; piece < kFragmentPieces; ++piece) tokens.codes[0][piece] = fragment_of(x.codes, piece, lane);
    tokens.sums[0][0] = x.sums.words[0], tokens.sums[0][1] = x.sums.words[1];
    float u[1][4];
    if constexpr (kSix)
      multiply_six_bits(u, tokens, block, lane);
    else
      multiply_four_bits(u, tokens, block, lane);
    return {u[0][0], u[0][2]};
  }
};

// e4m3 with a scale for each row, as the file has them.
struct Floats {
  static constexpr int kSlots = 10, kSlotBytes = kSlotParts * kRowBoxBytes, kMostWindow = kSlotParts * kSlots,
                       kInputBytes = 1;
  static constexpr bool kHasSixBits = false, kIsFloat = true, kIsBf16 = false;
  __host__ __device__ static constexpr int terms_of(int columns) { return columns / kFloatTermColumns; }
  struct Factors {};  // wgmma reads codes from shared memory
};

// bf16, as the file has it, for layers of which a warp has at most one tile of a product. A warp waits for slots of its
// own tile alone, which are at most kProductWarps apart. The parity of a barrier is the same when the awaited copy has
// arrived as while the copy before it into the same place, kSlots before, is on its way. The window excludes the
// latter: when the warp's last slot was copied, all parts more than kMostWindow before it had arrived.
struct Bf16 {
  static constexpr int kSlots = 12, kSlotBytes = kSlotParts * kRowBoxBytes,
                       kMostWindow = kSlotParts * (kSlots - kProductWarps), kInputBytes = 2;
  static constexpr bool kHasSixBits = false, kIsFloat = false, kIsBf16 = true;
  __host__ __device__ static constexpr int terms_of(int /*columns*/) { return 1; }
  struct Factors {};
};

// By a warp: the terms of blocks, each times its own factors, or all times the same. `six`: they are of q6_k.
template <typename W, int kNum, int kFactors>
__device__ inline void multiply(float2 (&terms)[kNum], const uint8_t* const (&blocks)[kNum],
                                const typename W::Factors (&x)[kFactors], bool six, int lane) {
  static_assert(kFactors == kNum || kFactors == 1);
  if (W::kHasSixBits && six) {
#pragma unroll
    for (int n = 0; n < kNum; ++n) terms[n] = W::template multiply<true>(blocks[n], x[n % kFactors], lane);
  } else {
#pragma unroll
    for (int n = 0; n < kNum; ++n) terms[n] = W::template multiply<false>(blocks[n], x[n % kFactors], lane);
  }
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
