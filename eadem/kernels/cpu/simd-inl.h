// SPDX-License-Identifier: Apache-2.0
//
// The vocabulary of the CPU kernels, compiled once per instruction set: loads and stores that widen and round,
// remainders, reductions, exp and what builds on it. A vector is `Vec`, kLanes floats (1 on the scalar target).
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_SIMD_INL_H_
#undef EADEM_KERNELS_CPU_SIMD_INL_H_
#else
#define EADEM_KERNELS_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "eadem/core/dtype.h"
#include "eadem/core/e4m3.h"
#include "eadem/core/lookups.h"
#include "eadem/kernels/elementwise.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Lanes = hn::CappedTag<float, 16>;
using Vec = hn::Vec<Lanes>;
using Mask = hn::Mask<Lanes>;
inline constexpr int64_t kLanes = hn::MaxLanes(Lanes());

// How far loops over the vectors of a tile are unrolled: enough to keep all of them in registers. On the scalar target
// a tile has hundreds of one-float vectors, which no register file holds, and unrolling them takes GCC minutes.
inline constexpr int kUnroll = HWY_TARGET == HWY_SCALAR ? 1 : 16;

HWY_INLINE Vec set(float value) { return hn::Set(Lanes(), value); }
HWY_INLINE Vec zero() { return hn::Zero(Lanes()); }

// ---- Loads widen to f32, exactly; stores round once, to nearest even.

HWY_INLINE Vec load(const float* p) { return hn::LoadU(Lanes(), p); }

HWY_INLINE Vec load(const bf16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return set(p->to_float());
#else
  const hn::Rebind<uint16_t, Lanes> d16;
  const hn::RebindToUnsigned<Lanes> d32;
  return hn::BitCast(Lanes(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, &p->bits))));
#endif
}

HWY_INLINE Vec load(const f16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return set(p->to_float());
#elif HWY_TARGET == HWY_SSE4
  // No conversion instruction: move the bits into f32's fields and multiply by 2^112, which is exact and also
  // normalizes subnormals; exponents that were all ones (infinity, NaN) are then set to all ones again.
  const hn::Rebind<uint16_t, Lanes> d16;
  const hn::RebindToUnsigned<Lanes> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, &p->bits));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x7fffu)));
  const Vec value = hn::Mul(hn::BitCast(Lanes(), magnitude), set(0x1p112f));
  const Vec special = hn::BitCast(Lanes(), hn::Set(d32, 0x7f800000u));
  const Vec fixed = hn::IfThenElse(hn::Ge(value, set(65536.0f)), hn::Or(value, special), value);
  return hn::Or(fixed, hn::BitCast(Lanes(), sign));
#else
  const hn::Rebind<hwy::float16_t, Lanes> d16;
  return hn::PromoteTo(Lanes(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

// Loads 8-bit codes of encodings as levels: the numbers that a scale multiplies.
HWY_INLINE Vec load(const int8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return set(static_cast<float>(*p));
#else
  const hn::Rebind<int8_t, Lanes> d8;
  const hn::RebindToSigned<Lanes> d32;
  return hn::ConvertTo(Lanes(), hn::PromoteTo(d32, hn::LoadU(d8, p)));
#endif
}

#if HWY_TARGET != HWY_SCALAR
// Decodes e4m3 numbers that hold their sign in bits 31 to 27 and their other bits in 26 … 20. With bits 30 to 27
// cleared, these are the fields of f32, except for the exponent's bias. Multiplying by 2^120 corrects the bias exactly
// and normalizes subnormals. The two NaN codes, which no quantizer here writes, decode to +-480.
HWY_INLINE Vec e4m3_levels(hn::Vec<hn::RebindToSigned<Lanes>> bits) {
  const hn::RebindToSigned<Lanes> d32;
  return hn::Mul(hn::BitCast(Lanes(), hn::And(bits, hn::Set(d32, static_cast<int32_t>(0x87f00000u)))), set(0x1p120f));
}
#endif

HWY_INLINE Vec load(const e4m3_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return set(p->to_float());
#else
  const hn::Rebind<int8_t, Lanes> d8;
  const hn::RebindToSigned<Lanes> d32;
  return e4m3_levels(hn::ShiftLeft<20>(hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const int8_t*>(p)))));
#endif
}

HWY_INLINE void store(Vec v, float* p) { hn::StoreU(v, Lanes(), p); }

HWY_INLINE void store(Vec v, bf16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  *p = bf16_t::from_float(hn::GetLane(v));
#else
  const hn::RebindToUnsigned<Lanes> d32;
  const hn::Rebind<int32_t, Lanes> d32i;
  const hn::Rebind<uint16_t, Lanes> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x00400000u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(d32i, upper)), d16, &p->bits);
#endif
}

HWY_INLINE void store(Vec v, f16_t* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_SSE4
  float values[kLanes];
  store(v, values);
  for (int64_t i = 0; i < kLanes; ++i) p[i] = f16_t::from_float(values[i]);
#else
  const hn::Rebind<hwy::float16_t, Lanes> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

// ---- Remainders: the first n < kLanes elements; nothing beyond them is touched. Missing lanes read as zero.

template <typename T>
HWY_INLINE Vec load_n(const T* p, int64_t n) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  if constexpr (sizeof(T) == 4) return hn::MaskedLoad(hn::FirstN(Lanes(), static_cast<size_t>(n)), Lanes(), p);
#endif
  T values[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) values[i] = p[i];
  return load(values);
}

template <typename T>
HWY_INLINE void store_n(Vec v, T* p, int64_t n) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  if constexpr (sizeof(T) == 4) {
    hn::BlendedStore(v, hn::FirstN(Lanes(), static_cast<size_t>(n)), Lanes(), p);
    return;
  }
#endif
  T values[kLanes];
  store(v, values);
  for (int64_t i = 0; i < n; ++i) p[i] = values[i];
}

// y[i] = f(x0[i], x1[i], …) for i < n. y may be any of the inputs.
template <typename Y, typename Function, typename... X>
HWY_INLINE void map(Y* y, int64_t n, Function f, const X*... x) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(f(load(x + i)...), y + i);
  if (i < n) store_n(f(load_n(x + i, n - i)...), y + i, n - i);
}

// ---- Reductions. The order is fixed per instruction set: four accumulators of kLanes, then a fixed tree.

HWY_INLINE float sum_lanes(Vec v) { return hn::GetLane(hn::SumOfLanes(Lanes(), v)); }
HWY_INLINE float max_lanes(Vec v) { return hn::GetLane(hn::MaxOfLanes(Lanes(), v)); }

// Reduces with f(acc, x0[i], x1[i], …), which adds the contribution of element i to acc. Lanes past the end are zero in
// every input; f must add nothing for them.
template <typename Function, typename... X>
HWY_INLINE float reduce(int64_t n, Function f, const X*... x) {
  Vec a = zero(), b = zero(), c = zero(), d = zero();
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a = f(a, load(x + i)...);
    b = f(b, load(x + i + kLanes)...);
    c = f(c, load(x + i + 2 * kLanes)...);
    d = f(d, load(x + i + 3 * kLanes)...);
  }
  for (; i + kLanes <= n; i += kLanes) a = f(a, load(x + i)...);
  if (i < n) b = f(b, load_n(x + i, n - i)...);
  return sum_lanes(hn::Add(hn::Add(a, b), hn::Add(c, d)));
}

HWY_INLINE float dot(const float* x, const float* y, int64_t n) {
  return reduce(
      n, [](Vec acc, Vec a, Vec b) { return hn::MulAdd(a, b, acc); }, x, y);
}

// The largest of x[0, n), n >= 1. The result is unspecified if any element is NaN.
HWY_INLINE float max_of(const float* x, int64_t n) {
  Vec most = set(x[0]);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = hn::Max(most, load(x + i));
  float result = max_lanes(most);
  for (; i < n; ++i) result = std::max(result, x[i]);
  return result;
}

// ---- Functions.

// e^x within 2 ulp (also in the subnormal range): 0 below -104, infinity above 88.8, NaN for NaN.
// e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2; the polynomial's own error is 0.2 of 2^-24.
HWY_INLINE Vec exp(Vec x) {
  const hn::RebindToSigned<Lanes> di;
  // Lanes whose result is 0 (masked scores are -infinity) are computed as e^0 and cleared at the end: a product that
  // underflows costs a hundred cycles in microcode.
  const Mask vanishes = hn::Lt(x, set(-104.0f));
  const Vec bounded = hn::IfThenZeroElse(vanishes, hn::Min(x, set(90.0f)));
  const auto n = hn::NearestInt(hn::Mul(bounded, set(1.44269504f)));
  const Vec n_float = hn::ConvertTo(Lanes(), n);
  // ln 2 in two parts; the first has 9 significant bits, so its product with n is exact without FMA too.
  Vec r = hn::NegMulAdd(n_float, set(0.693359375f), bounded);
  r = hn::NegMulAdd(n_float, set(-2.12194440e-4f), r);
  Vec p = set(0x1.6d1118p-10f);
  p = hn::MulAdd(p, r, set(0x1.120b7ep-7f));
  p = hn::MulAdd(p, r, set(0x1.55551ap-5f));
  p = hn::MulAdd(p, r, set(0x1.5554dcp-3f));
  p = hn::MulAdd(p, r, set(0.5f));
  p = hn::MulAdd(hn::Mul(r, r), p, hn::Add(r, set(1.0f)));
  // 2^n in two factors, each a normal number: the product rounds once at either end of the range.
  const auto n_low = hn::ShiftRight<1>(n);
  const auto n_high = hn::Sub(n, n_low);
  const auto bias = hn::Set(di, 127);
  const Vec low = hn::BitCast(Lanes(), hn::ShiftLeft<23>(hn::Add(n_low, bias)));
  const Vec high = hn::BitCast(Lanes(), hn::ShiftLeft<23>(hn::Add(n_high, bias)));
  const Vec result = hn::IfThenZeroElse(vanishes, hn::Mul(hn::Mul(p, low), high));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// e^x for x <= 0, as softmax needs it, within 2 ulp: 0 below -87, where 2^n would not be a normal number; NaN for NaN.
// It uses the method of exp with half of its instructions: adding 1.5 * 2^23 + 127 rounds x / ln 2 to the integer n and
// leaves the biased exponent of 2^n in the lowest bits.
HWY_INLINE Vec exp_of_negative(Vec x) {
  const hn::RebindToUnsigned<Lanes> du;
  const Vec magic = set(0x1.8p23f + 127.0f);
  const Mask vanishes = hn::Lt(x, set(-87.0f));
  const Vec shifted = hn::MulAdd(x, set(1.44269504f), magic);
  const Vec n = hn::Sub(shifted, magic);
  Vec r = hn::NegMulAdd(n, set(0.693359375f), x);
  r = hn::NegMulAdd(n, set(-2.12194440e-4f), r);
  Vec p = set(0x1.6d1118p-10f);
  p = hn::MulAdd(p, r, set(0x1.120b7ep-7f));
  p = hn::MulAdd(p, r, set(0x1.55551ap-5f));
  p = hn::MulAdd(p, r, set(0x1.5554dcp-3f));
  p = hn::MulAdd(p, r, set(0.5f));
  p = hn::MulAdd(hn::Mul(r, r), p, hn::Add(r, set(1.0f)));
  const Vec power = hn::BitCast(Lanes(), hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
  return hn::IfThenZeroElse(vanishes, hn::Mul(p, power));
}

// y = softmax of x[0, n), n >= 1. y may be x.
HWY_INLINE void softmax_row(float* y, const float* x, int64_t n) {
  const float most = max_of(x, n);
  map(
      y, n, [m = set(most)](Vec v) { return exp(hn::Sub(v, m)); }, x);
  const float sum = reduce(
      n, [](Vec acc, Vec v) { return hn::Add(acc, v); }, static_cast<const float*>(y));
  map(
      y, n, [s = set(sum)](Vec v) { return hn::Div(v, s); }, y);
}

// 1 / (1 + e^-x)
HWY_INLINE Vec sigmoid(Vec x) { return hn::Div(set(1.0f), hn::Add(set(1.0f), exp(hn::Neg(x)))); }

// log(1 + e^x) within 6 ulp: max(x, 0) + log(1 + u), u = e^-|x|, where log(1 + u) = 2 artanh(z), z = u / (2 + u) <=
// 1/3, by its series to z^15.
HWY_INLINE Vec softplus(Vec x) {
  const Vec u = exp(hn::Neg(hn::Abs(x)));
  const Vec z = hn::Div(u, hn::Add(u, set(2.0f)));
  const Vec square = hn::Mul(z, z);
  Vec p = set(2.0f / 15.0f);
  p = hn::MulAdd(p, square, set(2.0f / 13.0f));
  p = hn::MulAdd(p, square, set(2.0f / 11.0f));
  p = hn::MulAdd(p, square, set(2.0f / 9.0f));
  p = hn::MulAdd(p, square, set(2.0f / 7.0f));
  p = hn::MulAdd(p, square, set(2.0f / 5.0f));
  p = hn::MulAdd(p, square, set(2.0f / 3.0f));
  p = hn::MulAdd(p, square, set(2.0f));
  const Vec positive = hn::IfThenElse(hn::Lt(x, zero()), zero(), x);  // NaN stays
  return hn::MulAdd(p, z, positive);
}

// The hyperbolic tangent within 4 ulp: an odd polynomial near 0, and e^(-2 |x|) beyond.
HWY_INLINE Vec tanh(Vec x) {
  const Vec size = hn::Abs(x), one = set(1.0f);
  const Vec square = hn::Mul(x, x);
  Vec p = set(-0x1.75e1c4p-8f);
  p = hn::MulAdd(p, square, set(0x1.52269ap-6f));
  p = hn::MulAdd(p, square, set(-0x1.b83c5ap-5f));
  p = hn::MulAdd(p, square, set(0x1.110726p-3f));
  p = hn::MulAdd(p, square, set(-0x1.555532p-2f));
  const Vec near = hn::MulAdd(hn::Mul(p, square), x, x);
  const Vec e = exp_of_negative(hn::Mul(set(-2.0f), size));
  const Vec far = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Lt(size, set(0.625f)), near, far);
}

// cap * tanh(x / cap), given 1 / cap.
HWY_INLINE Vec soft_cap(Vec x, Vec cap, Vec inverse) { return hn::Mul(cap, tanh(hn::Mul(x, inverse))); }

// e^(-x^2 / 2), with x^2 split so that its rounding does not grow into the result.
HWY_INLINE Vec gauss(Vec x) {
  const hn::RebindToUnsigned<Lanes> du;
  const Vec size = hn::Min(hn::Abs(x), set(40.0f));  // beyond, the result is 0; infinity - infinity would be NaN
  const Vec top = hn::BitCast(Lanes(), hn::And(hn::BitCast(du, size), hn::Set(du, 0xfffff000u)));  // exact square
  const Vec rest = hn::Mul(hn::Sub(size, top), hn::Add(size, top));
  const Vec half = set(-0.5f);
  return hn::Mul(exp(hn::Mul(hn::Mul(top, top), half)), exp(hn::Mul(rest, half)));
}

// Phi(x) = (1 + erf(x / sqrt 2)) / 2, the normal distribution, with small relative error in the lower tail too:
// Phi(-x) = e^(-x^2 / 2) w P(w), w = 1 / (1 + x / 4); P of degree 9 fitted on [0, 14.6], where Phi leaves f32.
HWY_INLINE Vec normal_cdf(Vec x, Vec gauss_x) {
  const Vec w = hn::Div(set(1.0f), hn::MulAdd(hn::Abs(x), set(0.25f), set(1.0f)));
  Vec p = set(0x1.0307cep-6f);
  p = hn::MulAdd(p, w, set(-0x1.e15234p-5f));
  p = hn::MulAdd(p, w, set(0x1.5c6654p-5f));
  p = hn::MulAdd(p, w, set(0x1.482a4ap-5f));
  p = hn::MulAdd(p, w, set(0x1.cffe6ep-9f));
  p = hn::MulAdd(p, w, set(0x1.75ec00p-4f));
  p = hn::MulAdd(p, w, set(0x1.20cbeep-4f));
  p = hn::MulAdd(p, w, set(0x1.88706ep-4f));
  p = hn::MulAdd(p, w, set(0x1.9763b8p-4f));
  p = hn::MulAdd(p, w, set(0x1.9892d0p-4f));
  const Vec tail = hn::Mul(hn::Mul(gauss_x, w), p);
  return hn::IfThenElse(hn::Lt(x, zero()), tail, hn::Sub(set(1.0f), tail));
}

// ---- Activations and their derivatives; see kernels/elementwise.h.

template <ActivationKind kKind>
HWY_INLINE Vec activate(Vec x) {
  if constexpr (kKind == ActivationKind::silu) {
    return hn::Div(x, hn::Add(set(1.0f), exp(hn::Neg(x))));
  } else if constexpr (kKind == ActivationKind::gelu) {
    return hn::Mul(x, normal_cdf(x, gauss(x)));
  } else if constexpr (kKind == ActivationKind::gelu_tanh) {
    // (1 + tanh u) / 2 = sigmoid(2u), which keeps its relative precision where tanh is close to -1.
    const Vec u2 = hn::MulAdd(hn::Mul(set(0.0713548163f), x), hn::Mul(x, x), hn::Mul(set(1.59576912f), x));
    return hn::Mul(x, sigmoid(u2));
  } else if constexpr (kKind == ActivationKind::sigmoid) {
    return sigmoid(x);
  } else {
    const Vec positive = hn::IfThenElse(hn::Lt(x, zero()), zero(), x);  // NaN stays
    if constexpr (kKind == ActivationKind::relu) return positive;
    return hn::Mul(positive, positive);
  }
}

template <ActivationKind kKind>
HWY_INLINE Vec activate_derivative(Vec x) {
  const Vec one = set(1.0f);
  if constexpr (kKind == ActivationKind::silu) {
    const Vec s = sigmoid(x);
    return hn::Mul(s, hn::MulAdd(x, sigmoid(hn::Neg(x)), one));
  } else if constexpr (kKind == ActivationKind::gelu) {
    const Vec g = gauss(x);
    return hn::MulAdd(hn::Mul(x, set(0.398942280f)), g, normal_cdf(x, g));
  } else if constexpr (kKind == ActivationKind::gelu_tanh) {
    const Vec x2 = hn::Mul(x, x);
    const Vec u2 = hn::MulAdd(hn::Mul(set(0.0713548163f), x), x2, hn::Mul(set(1.59576912f), x));
    const Vec du2 = hn::MulAdd(set(3 * 0.0713548163f), x2, set(1.59576912f));
    return hn::Mul(sigmoid(u2), hn::MulAdd(hn::Mul(x, sigmoid(hn::Neg(u2))), du2, one));
  } else if constexpr (kKind == ActivationKind::sigmoid) {
    return hn::Mul(sigmoid(x), sigmoid(hn::Neg(x)));
  } else {
    const Vec step = hn::IfThenElse(hn::Gt(x, zero()), one, zero());
    if constexpr (kKind == ActivationKind::relu) return step;
    return hn::Mul(hn::Add(step, step), x);
  }
}

// Returns f(type), where `type` is a null pointer to the elements of `dtype`: f32, bf16 or f16. It chooses a routine
// for a plan.
template <typename Function>
auto with_dtype(DType dtype, Function f) {
  count_lookup();
  switch (dtype) {
    case DType::bf16: return f(static_cast<bf16_t*>(nullptr));
    case DType::f16: return f(static_cast<f16_t*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}
template <typename Pointer>
using ElementOf = std::remove_cvref_t<std::remove_pointer_t<Pointer>>;

// Returns f(std::integral_constant<ActivationKind, kind>()), likewise.
template <typename Function>
auto with_activation(ActivationKind kind, Function f) {
  using K = ActivationKind;
  count_lookup();
  switch (kind) {
    case K::silu: return f(std::integral_constant<K, K::silu>());
    case K::gelu: return f(std::integral_constant<K, K::gelu>());
    case K::gelu_tanh: return f(std::integral_constant<K, K::gelu_tanh>());
    case K::relu: return f(std::integral_constant<K, K::relu>());
    case K::sigmoid: return f(std::integral_constant<K, K::sigmoid>());
    case K::relu2: break;
  }
  return f(std::integral_constant<K, K::relu2>());
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
