// SPDX-License-Identifier: Apache-2.0
//
// The log softmax of a row of logits, for training (cross_entropy) and serving (sample) alike, so that both give the
// same bits: log p[i] = (x[i] - largest) - log(sum of exp(x - largest)).
#ifndef EADEM_KERNELS_CPU_LOG_SOFTMAX_
#define EADEM_KERNELS_CPU_LOG_SOFTMAX_

#include <cstdint>

namespace eadem::kernels::cpu {

inline constexpr int64_t kSumBlock = 1024;

// The log-probability of a token with this logit, where `log_sum` is the logarithm of sum_exp. Its negative is the
// token's loss: rounding to f32 does not look at the sign.
inline float log_probability(float logit, float largest, double log_sum) {
  return static_cast<float>(static_cast<double>(logit - largest) - log_sum);
}

}  // namespace eadem::kernels::cpu

#endif  // EADEM_KERNELS_CPU_LOG_SOFTMAX_

// Per target.
#if defined(EADEM_KERNELS_CPU_LOG_SOFTMAX_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_LOG_SOFTMAX_INL_
#undef EADEM_KERNELS_CPU_LOG_SOFTMAX_INL_
#else
#define EADEM_KERNELS_CPU_LOG_SOFTMAX_INL_
#endif

#include <algorithm>

#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// The sum of exp(x[i] - most), in f32 within blocks of kSumBlock values and in f64 across them.
double sum_exp(const float* x, int64_t n, float most) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = std::min(n, begin + kSumBlock);
    Vec sum = zero();
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) sum = hn::Add(sum, exp(hn::Sub(load(x + i), set(most))));
    double block = sum_lanes(sum);
    if (i < end) {
      float rest[kLanes];
      store(exp(hn::Sub(load_n(x + i, end - i), set(most))), rest);
      for (int64_t j = 0; j < end - i; ++j) block += rest[j];
    }
    total += block;
  }
  return total;
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
