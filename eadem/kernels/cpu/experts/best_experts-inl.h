// SPDX-License-Identifier: Apache-2.0
//
// The choice of the best experts of a row: route and load_balancing_loss choose alike.

// Per target.
#if defined(EADEM_KERNELS_CPU_BEST_EXPERTS_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_BEST_EXPERTS_INL_
#undef EADEM_KERNELS_CPU_BEST_EXPERTS_INL_
#else
#define EADEM_KERNELS_CPU_BEST_EXPERTS_INL_
#endif

#include <cstdint>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// The best `top_k` so far, in falling order; of equals the lower number comes first. A NaN is better than nothing.
class Best {
 public:
  Best(int32_t* chosen, float* preferences, int64_t top_k)
      : chosen_(chosen), preferences_(preferences), top_k_(top_k) {}

  // Offers experts [begin, end).
  void offer(const float* preferences, int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      const float preference = preferences[e];
      if (count_ == top_k_ && !(preference > preferences_[top_k_ - 1])) continue;
      int64_t j = count_ < top_k_ ? count_++ : top_k_ - 1;
      for (; j > 0 && preference > preferences_[j - 1]; --j) {
        preferences_[j] = preferences_[j - 1];
        chosen_[j] = chosen_[j - 1];
      }
      preferences_[j] = preference;
      chosen_[j] = static_cast<int32_t>(e);
    }
  }

 private:
  int32_t* chosen_;
  float* preferences_;
  int64_t top_k_, count_ = 0;
};

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
