// SPDX-License-Identifier: Apache-2.0
//
// Scores of an int8 cache by the 8-bit dot product of processors that have one:
//
//   scores[r, j] = sum_d q[r, d] k[j, d]           codes of queries and of keys, keys as lanes
//
// As long as the sums stay below 2^24 they are the same numbers in i32 and in any order in f32, so that a row's bits
// do not depend on whether this or one of the f32 products computes it.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_CODE_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_CODE_SCORES_INL_H_
#undef EADEM_KERNELS_CPU_CODE_SCORES_INL_H_
#else
#define EADEM_KERNELS_CPU_CODE_SCORES_INL_H_
#endif

#include <cstring>

#include "eadem/kernels/cpu/attention/cached_rows-inl.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_words-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

inline constexpr int64_t kWordCodes = 4;                // codes of one key in a lane
inline constexpr int64_t kBlockCodes = 4 * kWordCodes;  // codes of one key in a 128-bit block

// The instruction multiplies unsigned codes by signed ones, so 128 is added to the codes of keys. `starts` [rows],
// which holds -128 times the sum of each row of q, corrects the result.
HWY_INLINE Words unsigned_codes(Words codes) { return hn::Xor(codes, hn::Set(WordLanes(), 0x80808080u)); }

// Writes scores [rows, kScoreGroups * kKeyGroup] with row stride scores_stride. q is [rows, head_dim rounded up to
// kWordCodes], padded with zeros.
template <int kRows>
HWY_NOINLINE void code_scores_tile(float* HWY_RESTRICT scores, int64_t scores_stride, const int8_t* HWY_RESTRICT q,
                                   int64_t q_stride, const int32_t* HWY_RESTRICT starts, const KeyGroups<int8_t>& keys,
                                   int64_t head_dim) {
  static_assert(kGroupVecs == 1);
  Ints acc[kRows][kScoreGroups];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int g = 0; g < kScoreGroups; ++g) acc[r][g] = hn::Set(IntLanes(), starts[r]);

  const int64_t steps = head_dim / kBlockCodes;
  int64_t d = 0;
  for (int64_t step = 0; step < steps; ++step, d += kBlockCodes) {
    Words words[kScoreGroups][4];
#pragma GCC unroll kUnroll
    for (int g = 0; g < kScoreGroups; ++g) {
      const int8_t* at = keys.at[g] + d;
      const int64_t stride = keys.stride[g];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) words[g][i] = unsigned_codes(load_blocks(WordLanes(), at + i * stride, 4 * stride));
      transpose_blocks_4x4(words[g][0], words[g][1], words[g][2], words[g][3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r) {
        const Ints four = broadcast_bytes(q + r * q_stride + d + i * kWordCodes);
#pragma GCC unroll kUnroll
        for (int g = 0; g < kScoreGroups; ++g) acc[r][g] = DotBytes<8>::dot(acc[r][g], words[g][i], four);
      }
    fetch_keys(keys, head_dim, step, steps);
  }
  for (; d < head_dim; d += kWordCodes)
    for (int g = 0; g < kScoreGroups; ++g) {
      uint32_t codes[kLanes] = {};
      const auto left = static_cast<size_t>(std::min(kWordCodes, head_dim - d));
      for (int64_t j = 0; j < kLanes; ++j) std::memcpy(&codes[j], keys.at[g] + j * keys.stride[g] + d, left);
      const Words words = unsigned_codes(hn::LoadU(WordLanes(), codes));
      for (int r = 0; r < kRows; ++r)
        acc[r][g] = DotBytes<8>::dot(acc[r][g], words, broadcast_bytes(q + r * q_stride + d));
    }

#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int g = 0; g < kScoreGroups; ++g)
      store(hn::ConvertTo(Lanes(), acc[r][g]), scores + r * scores_stride + g * kLanes);
}

HWY_INLINE void code_scores(float* scores, int64_t scores_stride, const int8_t* q, int64_t q_stride,
                            const int32_t* starts, const KeyGroups<int8_t>& keys, int64_t rows, int64_t head_dim) {
  for (; rows >= kScoreRows; rows -= kScoreRows) {
    code_scores_tile<kScoreRows>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    scores += kScoreRows * scores_stride, q += kScoreRows * q_stride, starts += kScoreRows;
  }
  static_assert(kScoreRows == 8);
  switch (rows) {
    case 1: return code_scores_tile<1>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    case 2: return code_scores_tile<2>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    case 3: return code_scores_tile<3>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    case 4: return code_scores_tile<4>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    case 5: return code_scores_tile<5>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    case 6: return code_scores_tile<6>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    case 7: return code_scores_tile<7>(scores, scores_stride, q, q_stride, starts, keys, head_dim);
    default: break;
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3

#endif  // per-target include guard
