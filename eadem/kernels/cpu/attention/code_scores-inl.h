// SPDX-License-Identifier: Apache-2.0
//
// Scores of an int8 cache by the 8-bit dot product of processors that have one:
//
//   scores[r, j] = sum_d q[r, d] k[j, d]           codes of queries and of keys, keys as lanes
//
// As long as the sums stay below 2^24 they are the same numbers in i32 and in any order in f32.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_CODE_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_CODE_SCORES_INL_H_
#undef EADEM_KERNELS_CPU_CODE_SCORES_INL_H_
#else
#define EADEM_KERNELS_CPU_CODE_SCORES_INL_H_
#endif

#include <cstring>

#include "eadem/kernels/cpu/attention/code_chunk-inl.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_words-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

inline constexpr int64_t kWordCodes = 4;                // codes of one key in a lane
inline constexpr int64_t kBlockCodes = 4 * kWordCodes;  // codes of one key in a 128-bit block
static_assert(kLanes == kKeyGroup);

// The instruction multiplies unsigned codes by signed ones, so 128 is added to the codes of keys. `starts` [rows],
// which holds -128 times the sum of each row of q, corrects the result.
HWY_INLINE Words unsigned_codes(Words codes) { return hn::Xor(codes, hn::Set(WordLanes(), 0x80808080u)); }

// sum + the dot product of unsigned codes and four signed ones in memory, which every lane takes.
HWY_INLINE Ints dot_of_four(Ints sum, Words codes, const int8_t* four) {
  asm("vpdpbusd %[four]%{1to16%}, %[codes], %[sum]"
      : [sum] "+v"(sum.raw)
      : [codes] "v"(codes.raw), [four] "m"(*reinterpret_cast<const int32_t*>(four)));
  return sum;
}

// Codes [d, d + 16) of 16 keys as words: lane j of words[i] has codes d + 4 i … of key j.
HWY_INLINE void load_key_words(Words (&words)[4], const int8_t* const (&base)[4], int64_t stride, int64_t stride3) {
  constexpr __mmask16 kAll = 0xffff;
  const auto rows = [&](int64_t offset) {
    const auto block = [&](int b) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(base[b] + offset)); };
    // The variant with a mask of all lanes, since GCC says of the other that it reads what is not set.
    __m512i r = _mm512_zextsi128_si512(block(0));
    r = _mm512_maskz_inserti32x4(kAll, r, block(1), 1);
    r = _mm512_maskz_inserti32x4(kAll, r, block(2), 2);
    return unsigned_codes(Words{_mm512_maskz_inserti32x4(kAll, r, block(3), 3)});
  };
  words[0] = rows(0), words[1] = rows(stride), words[2] = rows(2 * stride), words[3] = rows(stride3);
  transpose_blocks_4x4(words[0], words[1], words[2], words[3]);
}

// Writes scores [kRows, kKeyGroup], whose rows are kChunk apart. q is [rows, head_dim rounded up to kWordCodes], padded
// with zeros. `keys` are kKeyGroup rows of head_dim codes.
template <int kRows>
HWY_NOINLINE void code_scores_tile(float* HWY_RESTRICT scores, const int8_t* HWY_RESTRICT q, int64_t q_stride,
                                   const int32_t* HWY_RESTRICT starts, const int8_t* HWY_RESTRICT keys,
                                   int64_t head_dim, FetchAhead& ahead) {
  Ints acc[kRows];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r) acc[r] = hn::Set(IntLanes(), starts[r]);
  const int64_t stride = head_dim, stride3 = 3 * stride;
  const int8_t* base[4] = {keys, keys + 4 * stride, keys + 8 * stride, keys + 12 * stride};
  int64_t d = 0;
  for (; d + kBlockCodes <= head_dim; d += kBlockCodes) {
    Words words[4];
    load_key_words(words, base, stride, stride3);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r) acc[r] = dot_of_four(acc[r], words[i], q + r * q_stride + d + i * kWordCodes);
    for (const int8_t*& b : base) b += kBlockCodes;
    // Four addresses and two distances, which GCC would otherwise make sixteen addresses of.
    asm("" : "+r"(base[0]), "+r"(base[1]), "+r"(base[2]), "+r"(base[3]));
    ahead.fetch_part();
  }
  for (; d < head_dim; d += kWordCodes) {
    uint32_t codes[kLanes] = {};
    const auto left = static_cast<size_t>(std::min(kWordCodes, head_dim - d));
    for (int64_t j = 0; j < kLanes; ++j) std::memcpy(&codes[j], keys + j * stride + d, left);
    const Words words = unsigned_codes(hn::LoadU(WordLanes(), codes));
    for (int r = 0; r < kRows; ++r) acc[r] = dot_of_four(acc[r], words, q + r * q_stride + d);
  }
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r) store(hn::ConvertTo(Lanes(), acc[r]), scores + r * kChunk);
}

HWY_INLINE void code_scores(float* scores, const int8_t* q, int64_t q_stride, const int32_t* starts, const int8_t* keys,
                            int64_t rows, int64_t head_dim, FetchAhead& ahead) {
  constexpr int64_t kRows = 8;
  for (; rows >= kRows; rows -= kRows) {
    code_scores_tile<kRows>(scores, q, q_stride, starts, keys, head_dim, ahead);
    scores += kRows * kChunk, q += kRows * q_stride, starts += kRows;
  }
  switch (rows) {
    case 1: return code_scores_tile<1>(scores, q, q_stride, starts, keys, head_dim, ahead);
    case 2: return code_scores_tile<2>(scores, q, q_stride, starts, keys, head_dim, ahead);
    case 3: return code_scores_tile<3>(scores, q, q_stride, starts, keys, head_dim, ahead);
    case 4: return code_scores_tile<4>(scores, q, q_stride, starts, keys, head_dim, ahead);
    case 5: return code_scores_tile<5>(scores, q, q_stride, starts, keys, head_dim, ahead);
    case 6: return code_scores_tile<6>(scores, q, q_stride, starts, keys, head_dim, ahead);
    case 7: return code_scores_tile<7>(scores, q, q_stride, starts, keys, head_dim, ahead);
    default: break;
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3

#endif  // per-target include guard
