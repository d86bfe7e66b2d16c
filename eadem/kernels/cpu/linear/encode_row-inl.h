// SPDX-License-Identifier: Apache-2.0
//
// Encodes a row of numbers as 8-bit codes and one scale, bit for bit as RowEncoding does.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_ENCODE_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_ENCODE_ROW_INL_H_
#undef EADEM_KERNELS_CPU_ENCODE_ROW_INL_H_
#else
#define EADEM_KERNELS_CPU_ENCODE_ROW_INL_H_
#endif

#include <limits>

#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

HWY_INLINE void encode_level(int8_t* code, Vec quotient, int64_t n) {
  const Vec bounded = hn::Max(hn::Min(quotient, set(127.0f)), set(-127.0f));
  const auto levels = hn::NearestInt(bounded);
#if HWY_TARGET != HWY_SCALAR
  if (n == kLanes)
    return hn::StoreU(hn::DemoteTo(hn::Rebind<int8_t, Lanes>(), levels), hn::Rebind<int8_t, Lanes>(), code);
#endif
  int32_t values[kLanes];
  hn::StoreU(levels, hn::RebindToSigned<Lanes>(), values);
  for (int64_t i = 0; i < n; ++i) code[i] = static_cast<int8_t>(values[i]);
}

HWY_INLINE void encode_level(e4m3_t* code, Vec quotient, int64_t n) {
  float values[kLanes];
  store(quotient, values);
  for (int64_t i = 0; i < n; ++i) code[i] = e4m3_t::from_float(values[i]);
}

// Writes codes [n] and the scale of row [n]. The largest magnitude of the row is encoded as `largest`.
template <typename Code>
void encode_row(Code* codes, float* scale, const float* row, int64_t n, float largest) {
  Vec most = zero(), spoiled = zero();  // x * 0 is NaN where x is not finite
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = n - i >= kLanes ? load(row + i) : load_n(row + i, n - i);
    most = hn::Max(most, hn::Abs(x));
    spoiled = hn::MulAdd(x, zero(), spoiled);
  }
  *scale = max_lanes(most) / largest + sum_lanes(spoiled);
  if (!(*scale > 0.0f)) {
    if (*scale != 0.0f) *scale = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(reinterpret_cast<uint8_t*>(codes), n, uint8_t{0});
    return;
  }
  const Vec divisor = set(*scale);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = std::min(kLanes, n - i);
    encode_level(codes + i, hn::Div(count == kLanes ? load(row + i) : load_n(row + i, count), divisor), count);
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
