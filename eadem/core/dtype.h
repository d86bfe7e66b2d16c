// SPDX-License-Identifier: Apache-2.0
//
// Element types. The 16-bit floats are storage types: they convert to and from f32, and all arithmetic is f32.
// Device compilers read this header; it includes the standard library only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace eadem {

enum class DType : uint8_t { f32, bf16, f16, f64, i32, i64, u8 };

constexpr size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::u8: return 1;
  }
  return 0;
}

constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f64: return "f64";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
  }
  return "?";
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// The dtype named `name` ("f32", "bf16", …), or nothing.
constexpr std::optional<DType> dtype_from_name(std::string_view name) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64, DType::u8})
    if (dtype_name(dtype) == name) return dtype;
  return std::nullopt;
}

// Unit roundoff: the largest relative error of one rounding to `dtype`. 0 for integers.
constexpr double dtype_unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f32: return 0x1p-24;
    case DType::bf16: return 0x1p-8;  // round to nearest even, 8 bits of significand
    case DType::f16: return 0x1p-11;
    case DType::f64: return 0x1p-53;
    default: return 0.0;
  }
}

// Brain float: the upper half of an f32.
struct bf16_t {
  uint16_t bits;

  // Rounds to nearest even. NaN stays NaN (quiet), infinities stay.
  static constexpr bf16_t from_float(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x0040u)};
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
  constexpr bool is_finite() const { return (bits & 0x7f80u) != 0x7f80u; }
  constexpr float to_float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

// IEEE 754 binary16.
struct f16_t {
  uint16_t bits;

  // Rounds to nearest even; overflow gives infinity, NaN stays NaN (quiet).
  static constexpr f16_t from_float(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to >= 2^16
    if (magnitude < 0x33000001u) return {static_cast<uint16_t>(sign)};             // rounds to zero
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const int shift = exponent < -14 ? 13 + (-14 - exponent) : 13;  // subnormals drop more bits
    const uint32_t kept = significand >> shift;
    const uint32_t rest = significand & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rounded = kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u);
    const uint32_t biased = exponent < -14 ? 0u : static_cast<uint32_t>(exponent + 14) << 10;
    return {static_cast<uint16_t>(sign | (biased + rounded))};
  }
  constexpr bool is_finite() const { return (bits & 0x7c00u) != 0x7c00u; }
  constexpr float to_float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float value = static_cast<float>(fraction) * 0x1p-24f;  // exact: at most 10 bits
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
};

static_assert(sizeof(bf16_t) == 2 && sizeof(f16_t) == 2);

// The dtype of a C++ element type.
template <typename T>
inline constexpr DType dtype_of = [] { static_assert(sizeof(T) == 0, "no dtype for T"); }();
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<bf16_t> = DType::bf16;
template <>
inline constexpr DType dtype_of<f16_t> = DType::f16;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::u8;

}  // namespace eadem
