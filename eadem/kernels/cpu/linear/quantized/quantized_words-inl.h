// SPDX-License-Identifier: Apache-2.0
//
// Vectors of 32-bit words for quantized weights. Lane n holds four bytes, or two 16-bit numbers, of output n. Dot
// products of both kinds are here.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_QUANTIZED_WORDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_QUANTIZED_WORDS_INL_H_
#undef EADEM_KERNELS_CPU_QUANTIZED_WORDS_INL_H_
#else
#define EADEM_KERNELS_CPU_QUANTIZED_WORDS_INL_H_
#endif

#include <cstring>

#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// Lane n of a vector of words holds four bytes of output n.
using WordLanes = hn::RebindToUnsigned<Lanes>;
using Words = hn::Vec<WordLanes>;
using IntLanes = hn::RebindToSigned<Lanes>;
using Ints = hn::Vec<IntLanes>;

HWY_INLINE Words load_words(const uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return hn::Set(WordLanes(), word);
#else
  return hn::BitCast(WordLanes(), hn::LoadU(hn::Repartition<uint8_t, WordLanes>(), p));
#endif
}

HWY_INLINE void store_words(Words v, uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  const uint32_t word = hn::GetLane(v);
  std::memcpy(p, &word, sizeof(word));
#else
  const hn::Repartition<uint8_t, WordLanes> d8;
  hn::StoreU(hn::BitCast(d8, v), d8, p);
#endif
}

// ---- The dot product of four bytes: sum[n] += sum_j w[n][j] * x[j], w unsigned, x signed, not -128, and broadcast.

HWY_INLINE Ints broadcast_bytes(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return hn::Set(IntLanes(), word);
}

// DotBytes uses the processor's 8-bit dot product through inline assembly, because this code is also compiled for
// processors without it. Callers check for the instruction first.
#if HWY_TARGET == HWY_AVX3
struct DotInstruction {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    asm("vpdpbusd %[x], %[w], %[sum]" : [sum] "+v"(sum.raw) : [w] "v"(w.raw), [x] "v"(x.raw));
    return sum;
  }
};
template <bool>
using DotBytes = DotInstruction;
#elif HWY_TARGET == HWY_NEON
// This instruction takes both operands as signed.
HWY_INLINE Ints dot_signed(Ints sum, Ints w, Ints x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return Ints(vdotq_s32(sum.raw, vreinterpretq_s8_s32(w.raw), vreinterpretq_s8_s32(x.raw)));
#else
  // The assembler must accept every instruction that the compiler uses around this one.
  asm(".arch armv8.2-a+crypto+dotprod\n\tsdot %[sum].4s, %[w].16b, %[x].16b"
      : [sum] "+w"(sum.raw)
      : [w] "w"(w.raw), [x] "w"(x.raw));
  return sum;
#endif
}

// The instruction reads a code of 128 or more (possible if kBytes) as negative. Its top bit, worth -128, is therefore
// multiplied by -x separately.
template <bool kBytes>
struct DotBytes {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    const Ints codes = hn::BitCast(IntLanes(), w);
    if constexpr (!kBytes) return dot_signed(sum, codes, x);
    const Ints top = hn::And(codes, hn::Set(IntLanes(), static_cast<int32_t>(0x80808080u)));
    const Ints minus_x(vreinterpretq_s32_s8(vnegq_s8(vreinterpretq_s8_s32(x.raw))));
    return dot_signed(dot_signed(sum, hn::Xor(codes, top), x), top, minus_x);
  }
};
#endif

// Products of neighbours are added in 16 bits. Codes below 128 cannot overflow there. For larger codes (kBytes),
// products are added in 32 bits only.
template <bool kBytes>
struct DotPairs {
#if HWY_TARGET == HWY_NEON
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    const int8x16_t values = vreinterpretq_s8_s32(x.raw);
    if constexpr (!kBytes) {
      const int8x16_t signed_codes = vreinterpretq_s8_u32(w.raw);
      const int16x8_t first = vmull_s8(vget_low_s8(signed_codes), vget_low_s8(values));
      return Ints(vpadalq_s16(sum.raw, vpaddq_s16(first, vmull_high_s8(signed_codes, values))));
    }
    const uint8x16_t codes = vreinterpretq_u8_u32(w.raw);
    const int16x8_t low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes))), vmovl_s8(vget_low_s8(values)));
    const int16x8_t high =
        vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(codes))), vmovl_s8(vget_high_s8(values)));
    return Ints(vaddq_s32(sum.raw, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))));
  }
#elif HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    if constexpr (!kBytes) return hn::Add(sum, multiply_add(w, x));
    const Ints even = hn::And(x, hn::Set(IntLanes(), 0x00ff00ff));
    const Ints odd = hn::AndNot(hn::Set(IntLanes(), 0x00ff00ff), x);
    return hn::Add(sum, hn::Add(multiply_add(w, even), multiply_add(w, odd)));
  }

 private:
  static HWY_INLINE Ints multiply_add(Words w, Ints x) {
#if HWY_TARGET == HWY_AVX3
    return Ints{_mm512_madd_epi16(_mm512_maddubs_epi16(w.raw, x.raw), _mm512_set1_epi16(1))};
#elif HWY_TARGET == HWY_AVX2
    return Ints{_mm256_madd_epi16(_mm256_maddubs_epi16(w.raw, x.raw), _mm256_set1_epi16(1))};
#else
    return Ints{_mm_madd_epi16(_mm_maddubs_epi16(w.raw, x.raw), _mm_set1_epi16(1))};
#endif
  }
#else
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    uint32_t codes[kLanes];
    int32_t values[kLanes], sums[kLanes];
    hn::StoreU(w, WordLanes(), codes);
    hn::StoreU(x, IntLanes(), values);
    hn::StoreU(sum, IntLanes(), sums);
    for (int64_t n = 0; n < kLanes; ++n)
      for (int j = 0; j < 32; j += 8)
        sums[n] += static_cast<int32_t>(codes[n] >> j & 0xff) * static_cast<int8_t>(values[n] >> j & 0xff);
    return hn::LoadU(IntLanes(), sums);
  }
#endif
};

#if HWY_TARGET != HWY_AVX3 && HWY_TARGET != HWY_NEON
template <bool kBytes>
using DotBytes = DotPairs<kBytes>;
#endif

// ---- Two 16-bit numbers of each output in a word.

// sum_j a[n][j] * b[n][j], computed exactly.
HWY_INLINE Ints dot_pairs(Ints a, Ints b) {
#if HWY_TARGET == HWY_AVX3
  return Ints{_mm512_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return Ints{_mm256_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_SSE4
  return Ints{_mm_madd_epi16(a.raw, b.raw)};
#else
  const auto low = [](Ints v) { return hn::ShiftRight<16>(hn::ShiftLeft<16>(v)); };
  return hn::Add(hn::Mul(low(a), low(b)), hn::Mul(hn::ShiftRight<16>(a), hn::ShiftRight<16>(b)));
#endif
}

HWY_INLINE Ints pair_of(Ints low, Ints high) {
  return hn::Or(hn::And(low, hn::Set(IntLanes(), 0xffff)), hn::ShiftLeft<16>(high));
}

// Loads the pairs of bytes of kLanes outputs from p.
HWY_INLINE Ints load_pairs(const uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(IntLanes(), p[0] | p[1] << 16);
#else
  const hn::Repartition<uint16_t, WordLanes> d16;
  return hn::BitCast(IntLanes(), hn::PromoteTo(d16, hn::LoadU(hn::Rebind<uint8_t, decltype(d16)>(), p)));
#endif
}
HWY_INLINE Ints load_signed_pairs(const uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(IntLanes(), (static_cast<int8_t>(p[0]) & 0xffff) | static_cast<int8_t>(p[1]) * 0x10000);
#else
  const hn::Repartition<int16_t, WordLanes> d16;
  const hn::Rebind<int8_t, decltype(d16)> d8;
  return hn::BitCast(IntLanes(), hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(p))));
#endif
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
