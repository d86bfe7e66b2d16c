// SPDX-License-Identifier: Apache-2.0
//
// e4m3: sign, 4 bits of exponent with bias 7, 3 bits of fraction; no infinity, NaN where all bits but the sign are set.
// A code of encodings, not a dtype: nothing computes in it. The standard library only.
// Source: Micikevicius et al. 2022, FP8 formats for deep learning (the variant "fn").
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

namespace eadem {

struct e4m3_t {
  uint8_t bits;

  static constexpr float kLargest = 448.0f;

  // Rounds to nearest even; beyond the largest, the largest. What would be subnormal, below 2^-6, becomes 0 or 2^-6,
  // whichever is nearer (0 in the middle). Not for NaN.
  static constexpr e4m3_t from_float(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
    constexpr uint32_t kSmallest = 121u << 23, kHalf = 120u << 23;  // 2^-6 and 2^-7 as f32
    constexpr uint32_t kRebias = 120u << 3;                         // 127 - 7, above 3 bits of fraction
    if (magnitude < kSmallest) return {static_cast<uint8_t>(sign | (magnitude > kHalf ? 0x08u : 0u))};
    const uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    return {static_cast<uint8_t>(sign | std::min(rounded - kRebias, 0x7eu))};
  }

  // Exact, of subnormal codes too.
  constexpr float to_float() const {
    const float sign = (bits & 0x80u) != 0 ? -1.0f : 1.0f;
    const uint32_t exponent = (bits >> 3) & 15u, fraction = bits & 7u;
    if ((bits & 0x7fu) == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
    if (exponent == 0) return sign * static_cast<float>(fraction) * 0x1p-9f;
    return sign * std::bit_cast<float>(((exponent + 120u) << 23) | (fraction << 20));
  }
};

static_assert(sizeof(e4m3_t) == 1);

}  // namespace eadem
