// SPDX-License-Identifier: Apache-2.0
//
// Rounds rows to Int8Rows, bit for bit as Int8Rows::encode does.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_ROUND_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_ROUND_ROWS_INL_H_
#undef EADEM_KERNELS_CPU_ROUND_ROWS_INL_H_
#else
#define EADEM_KERNELS_CPU_ROUND_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/linear/quantized/quantized_rows.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// The scale of the codes of steps * 32 values at x, and the factor by which values are multiplied to give codes. If any
// value is not finite, neither is the scale.
struct CodeScale {
  float scale, inverse;
};
HWY_INLINE CodeScale code_scale(const float* x, int64_t steps) {
  const IntLanes di;
  // The largest magnitude, compared as integers: NaN is larger than infinity, which is larger than any number.
  Ints most = hn::Zero(di);
  for (int64_t v = 0; v < steps * kStep; v += kLanes)
    most = hn::Max(most, hn::And(hn::BitCast(di, load(x + v)), hn::Set(di, 0x7fffffff)));
  const int32_t bits = hn::GetLane(hn::MaxOfLanes(di, most));
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  // Below this limit the reciprocal is not finite; such a small group is encoded as zeros.
  const float inverse = largest > 0x1p-119f && bits < 0x7f800000 ? 127.0f / largest : 0.0f;
  return {inverse == 0.0f && bits < 0x7f800000 ? 0.0f : largest * (1.0f / 127.0f), inverse};
}

// The sum of 16 codes.
HWY_INLINE int32_t sum_of_codes(const int8_t* codes) {
#if HWY_TARGET == HWY_SCALAR
  int32_t sum = 0;
  for (int64_t i = 0; i < kStep / 2; ++i) sum += codes[i];
  return sum;
#else
  // Sums of bytes are of unsigned ones: each code counts 128 too much.
  const hn::Full128<uint8_t> d8;
  const hn::Full128<uint64_t> d64;
  const auto bytes = hn::Xor(hn::LoadU(d8, reinterpret_cast<const uint8_t*>(codes)), hn::Set(d8, 0x80));
  return static_cast<int32_t>(hn::GetLane(hn::SumOfLanes(d64, hn::SumsOf8(bytes)))) - 128 * (kStep / 2);
#endif
}

// Computes the codes of the 32 values at x, and their sums in both halves.
HWY_INLINE void round_step(int8_t* codes, int32_t* sums, const float* x, float inverse) {
  const hn::Rebind<int8_t, Lanes> d8;
  for (int64_t v = 0; v < kStep; v += kLanes) {
    const Vec scaled = inverse == 0.0f ? zero() : hn::Mul(load(x + v), set(inverse));
    hn::StoreU(hn::DemoteTo(d8, hn::NearestInt(scaled)), d8, codes + v);
  }
  for (int64_t half = 0; half < 2; ++half) sums[half] = sum_of_codes(codes + half * (kStep / 2));
}

// Rounds rows [begin, end) with a scale for kSteps steps.
template <int64_t kSteps>
void round_rows(const Int8RowPlanes& q, const RoundedSource& source, int64_t begin, int64_t end) {
  const int64_t all_steps = source.columns / kStep;
  for (int64_t r = begin; r < end; ++r) {
    const float* x = source.x + (r - source.first_row) * source.stride;
    for (int64_t s0 = 0; s0 < all_steps; s0 += kSteps) {
      const int64_t steps = std::min(kSteps, all_steps - s0), at = q.step(r, source.first_step + s0);
      const float* values = x + s0 * kStep;
      float ordered[kSteps * kStep];
      if (source.order != nullptr) {
        for (int64_t i = 0; i < steps * kStep; ++i) ordered[i] = x[source.order[s0 * kStep + i]];
        values = ordered;
      }
      const CodeScale scale = code_scale(values, steps);
      q.scales[at] = scale.scale;
      for (int64_t s = 0; s < steps; ++s)
        round_step(q.codes + (at + s) * kStep, q.sums + (at + s) * 2, values + s * kStep, scale.inverse);
    }
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
