// SPDX-License-Identifier: Apache-2.0
//
// Rows rounded to RowEncoding::fp8_e4m3, with the bits of RowEncoding::encode.
#pragma once

#include "eadem/kernels/cuda/device_math.cuh"

namespace eadem::kernels::cuda {

inline constexpr float kLargestE4m3 = 448.0f;

// The code of a quotient; e4m3_t::from_float defines it.
__device__ inline uint32_t e4m3_code(float quotient) {
  constexpr uint32_t kSmallest = 121u << 23, kHalf = 120u << 23, kRebias = 120u << 3;
  const uint32_t u = __float_as_uint(quotient), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude < kSmallest) return sign | (magnitude > kHalf ? 0x08u : 0u);
  const uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  return sign | min(rounded - kRebias, 0x7eu);
}

// The codes of two quotients, the first in the lower byte: nearest even, subnormals too, and what is too large becomes
// the largest.
__device__ inline uint32_t e4m3_codes(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  const auto code = [](float quotient) {
    constexpr float kSmallest = 0x1p-6f, kSubnormals = 0x1p9f;  // one is 2^-9
    if (isnan(quotient)) return 0x7fu;
    if (fabsf(quotient) >= kSmallest) return e4m3_code(quotient);
    return (__float_as_uint(quotient) >> 24 & 0x80u) | __float2uint_rn(fabsf(quotient) * kSubnormals);
  };
  return code(first) | code(second) << 8;
#else
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#endif
}

// A quotient as e4m3_t::from_float rounds it: below 2^-6, 0 or 2^-6.
__device__ inline float without_subnormals(float quotient) {
  const float size = fabsf(quotient);
  return size < 0x1p-6f ? copysignf(size > 0x1p-7f ? 0x1p-6f : 0.0f, quotient) : quotient;
}

// Divides by the scale of a row, correctly rounded; by one that is not positive, with 0 as the result. It has no
// division, whose rare cases are function calls, and no branch for each value, for which others would wait.
class Divisor {
 public:
  __device__ explicit Divisor(float scale)
      : factor_(!(scale > 0.0f)       ? 0.0f
                : scale <= 0x1p-100f  ? 0x1p64f
                : !(scale < 0x1p100f) ? 0x1p-64f
                                      : 1.0f),
        scale_(scale * factor_) {
    float approximate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(scale_));
    inverse_ = fmaf(fmaf(-scale_, approximate, 1.0f), approximate, approximate);
  }
  __device__ float operator()(float value) const {
    const float quotient = usual(value * factor_);
    return factor_ == 0.0f ? 0.0f : quotient;
  }
  // Whether `usual` divides as well.
  __device__ bool is_usual() const { return factor_ == 1.0f; }
  __device__ float usual(float value) const {
    // Each correction leaves less than one unit of the last place, the second with the right rounding (Markstein 1990).
    // Where a remainder underflows, the quotient's code is 0.
    float quotient = value * inverse_;
    quotient = fmaf(fmaf(-quotient, scale_, value), inverse_, quotient);
    quotient = fmaf(fmaf(-quotient, scale_, value), inverse_, quotient);
    return copysignf(quotient, value);  // the corrections make a negative zero positive
  }
  // Divides all values.
  template <int kWidth>
  __device__ void divide(float (&values)[kWidth]) const {
    if (is_usual()) {
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[n] = usual(values[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kWidth; ++n) values[n] = (*this)(values[n]);
    }
  }

 private:
  float factor_;  // of value and scale
  float scale_, inverse_;
};

// The magnitudes of values as integers, whose order is theirs; NaN is the largest.
template <int kWidth>
__device__ inline uint32_t largest_magnitude(uint32_t largest, const float (&values)[kWidth]) {
#pragma unroll
  for (int n = 0; n < kWidth; ++n) largest = max(largest, __float_as_uint(values[n]) & 0x7fffffffu);
  return largest;
}
// The scale of a row whose largest magnitude is `most`.
__device__ inline float e4m3_scale_of(uint32_t most) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  return most < kInfinity ? __uint_as_float(most) / kLargestE4m3 : __uint_as_float(0x7fc00000u);
}
// By all threads of a block, given the largest magnitude of each thread's values.
__device__ inline float e4m3_scale(uint32_t largest) { return e4m3_scale_of(block_max(largest)); }

// Stores the codes of eight values at a multiple of 8 bytes.
__device__ inline void store_codes(uint8_t* codes, const float (&values)[8], const Divisor& divided) {
  float quotients[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) quotients[n] = values[n];
  divided.divide(quotients);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < 8; n += 2)
    words[n / 4] |= e4m3_codes(without_subnormals(quotients[n]), without_subnormals(quotients[n + 1])) << (n % 4 * 8);
  *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
}

}  // namespace eadem::kernels::cuda
