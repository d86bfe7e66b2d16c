// SPDX-License-Identifier: Apache-2.0
//
// The codes of KV caches of 8 bits (core/encodings/row_encoding.h): how a row is rounded to them, and what they are as
// bf16, which holds the level of every code exactly.
#pragma once

#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

// A cache of bf16.
struct PlainRows {
  static constexpr bool kEncoded = false;
  static constexpr int kBytes = 2;  // of an element
};

struct Int8Code {
  static constexpr bool kEncoded = true;
  static constexpr int kBytes = 1;
  static constexpr float kLargest = 127.0f;

  __device__ static uint32_t code(float quotient) {
    return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(quotient, -kLargest), kLargest))) & 0xffu;
  }
  // The levels of two codes, which lie in the lower bytes of the halves of `low` and in the upper ones of `high`. As
  // fraction of a bf16, the lower seven bits of a code make 128 + themselves; 128 less, or 256 for a negative code, is
  // the level.
  __device__ static uint32_t levels(uint32_t low, uint32_t /*high*/) {
    const uint32_t sum = (low & 0x007f007fu) | 0x43004300u, less = (low & 0x00800080u) | 0x43004300u;
    uint32_t result;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(sum), "r"(less));
    return result;
  }
};

struct E4m3Code {
  static constexpr bool kEncoded = true;
  static constexpr int kBytes = 1;
  static constexpr float kLargest = kLargestE4m3;

  __device__ static uint32_t code(float quotient) { return e4m3_code(quotient); }
  // As above. Exponent and fraction of e4m3 are the lower bits of those of bf16, whose exponents are 120 more. NaN
  // becomes 480: a cache has no such codes but in rows that nobody has written.
  __device__ static uint32_t levels(uint32_t low, uint32_t high) {
    constexpr uint32_t kTwoTo120 = 0x7b807b80u;
    const uint32_t small = (low << 4 & 0x07f007f0u) | (high & 0x80008000u);
    uint32_t result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(small), "r"(kTwoTo120));
    return result;
  }
};

// Calls f with what rounds to `code`, which is not none, and decodes it.
template <typename Function>
cudaError_t with_code(KvCode code, Function&& f) {
  switch (code) {
    case KvCode::int8: return f(Int8Code{});
    case KvCode::e4m3: return f(E4m3Code{});
    default: return cudaErrorInvalidValue;
  }
}
// The same, or f(PlainRows{}).
template <typename Function>
cudaError_t with_kv_code(KvCode code, Function&& f) {
  return code == KvCode::none ? f(PlainRows{}) : with_code(code, f);
}

// The levels of codes 0 and 2, and of codes 1 and 3, of the four in a word.
template <typename Code>
__device__ inline uint32_t even_levels(uint32_t word) {
  return Code::levels(word, word << 8);
}
template <typename Code>
__device__ inline uint32_t odd_levels(uint32_t word) {
  return Code::levels(word >> 8, word);
}
// The levels of codes 2 kHalf and 2 kHalf + 1 of a word.
template <typename Code, int kHalf>
__device__ inline uint32_t half_levels(uint32_t word) {
  const uint32_t twice = __byte_perm(word, 0, kHalf == 0 ? 0x1100 : 0x3322);
  return Code::levels(twice, twice);
}

// c += a b for step `step` of the keys in `k`: matrices of 8 keys and 16 bytes each, two of which make a step of bf16,
// and one of codes (load_queries: kInFours).
template <typename Code>
__device__ inline void multiply_step(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&k)[4], int step) {
  if constexpr (Code::kEncoded)
    mma(c, a, even_levels<Code>(k[step]), odd_levels<Code>(k[step]));
  else
    mma(c, a, k[2 * step], k[2 * step + 1]);
}

// The scale of a row whose largest magnitude, as an integer, is `most`.
template <typename Code>
__device__ inline float row_scale(uint32_t most) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  return most < kInfinity ? __uint_as_float(most) / Code::kLargest : __uint_as_float(0x7fc00000u);
}
template <typename Code>
__device__ inline uint32_t row_code(float value, float scale) {
  return Code::code(scale > 0.0f ? value / scale : 0.0f);
}

}  // namespace eadem::kernels::cuda
