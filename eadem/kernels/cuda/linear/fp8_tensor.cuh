// SPDX-License-Identifier: Apache-2.0
//
// Codes beside one scale, with the bits of Fp8TensorEncoding.
#pragma once

#include "eadem/kernels/cuda/fp8_rows.cuh"

namespace eadem::kernels::cuda {

inline constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fffffffu;

template <bool kE5m2>
inline constexpr float kLargestCode = kE5m2 ? 57344.0f : kLargestE4m3;

// The scale of values whose largest magnitude is `most`, as an integer.
template <bool kE5m2>
__device__ float scale_of(uint32_t most) {
  return most < kInfinity ? __uint_as_float(most) / kLargestCode<kE5m2> : __uint_as_float(kNan);
}

// The codes of two quotients, the first in the lower byte: nearest even, subnormals too, and what is too large becomes
// the largest.
template <bool kE5m2>
__device__ uint32_t codes_of(float first, float second) {
  if constexpr (!kE5m2) {
    return e4m3_codes(first, second);
  } else {
    uint16_t codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
  }
}

// value / scale, correctly rounded. What is far beyond the largest code is made smaller, so that a quotient does not
// overflow; what is not finite becomes NaN.
__device__ inline float quotient_of(float value, float limit, const Divisor& divided) {
  const float quotient = divided(fminf(fmaxf(value, -limit), limit));
  return (__float_as_uint(value) & 0x7fffffffu) < kInfinity ? quotient : __uint_as_float(kNan);
}

// Rounds neighbouring values beside a scale.
template <bool kE5m2>
class Rounder {
 public:
  __device__ Rounder() : Rounder(0.0f) {}
  __device__ explicit Rounder(float scale)
      : divided_(scale),
        // Four times the largest; a scale so large that this overflows is divided by as it is.
        limit_(scale > 0.0f && scale < 0x1p100f ? scale * (4 * kLargestCode<kE5m2>) : INFINITY) {
    if (divided_.is_usual()) usual_end_ = __float_as_uint(limit_) + 1;
  }

  // The codes of values, four in a word. `largest` is the largest magnitude as an integer.
  template <int kWidth>
  __device__ void round(uint32_t (&words)[kWidth / 4], const float (&values)[kWidth], uint32_t largest) const {
    // One branch for all.
    if (largest < usual_end_)
      round_by(words, [&](int n) { return divided_.usual(values[n]); });
    else
      round_by(words, [&](int n) { return quotient_of(values[n], limit_, divided_); });
  }

 private:
  template <int kWords, typename QuotientOf>
  static __device__ void round_by(uint32_t (&words)[kWords], QuotientOf quotient) {
#pragma unroll
    for (int n = 0; n < kWords * 4; n += 4)
      words[n / 4] = codes_of<kE5m2>(quotient(n), quotient(n + 1)) | codes_of<kE5m2>(quotient(n + 2), quotient(n + 3))
                                                                         << 16;
  }

  Divisor divided_;
  float limit_;
  uint32_t usual_end_ = 0;  // Divisor::usual divides magnitudes below it (as integers)
};

}  // namespace eadem::kernels::cuda
