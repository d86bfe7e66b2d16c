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

// For words that are used several times: GCC 12 would read them again each time, as operands of other instructions.
HWY_INLINE Words load_words_once(const uint8_t* p) {
  Words words = load_words(p);
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
  asm("" : "+x"(words.raw));
#endif
  return words;
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

// ---- Dot products of four bytes: sum_j w[n][j] * x[j], w unsigned codes of kBits bits, x signed, not -128, broadcast.
//
// Each way is a class with
//   weights(w)        what is made of a word of weights once for all rows
//   dot(sum, w, x)    sum + the dot product
// and, where kSums > 1, with
//   multiply(w, x)    a partial result, sums of two products in 16 bits
//   add(a, b)         the sum of partial results of at most kSums products
//   total(partial)    the sum in 32 bits
//
// Where kCentersBytes, codes of 8 bits stand for code - 128.

HWY_INLINE Ints broadcast_bytes(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return hn::Set(IntLanes(), word);
}

inline constexpr bool kCentersBytes = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4;

struct WordWeights {
  static constexpr int kSums = 1;
  static HWY_INLINE Words weights(Words w) { return w; }
};

// DotBytes uses the processor's 8-bit dot product through inline assembly, because this code is also compiled for
// processors without it. Callers check for the instruction first.
#if HWY_TARGET == HWY_AVX3
struct DotInstruction : WordWeights {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    asm("vpdpbusd %[x], %[w], %[sum]" : [sum] "+v"(sum.raw) : [w] "v"(w.raw), [x] "v"(x.raw));
    return sum;
  }
};
template <int>
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

// The instruction reads a code of 128 or more as negative. Its top bit, worth -128, is therefore multiplied by -x
// separately.
template <int kBits>
struct DotBytes : WordWeights {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    const Ints codes = hn::BitCast(IntLanes(), w);
    if constexpr (kBits < 8) return dot_signed(sum, codes, x);
    const Ints top = hn::And(codes, hn::Set(IntLanes(), static_cast<int32_t>(0x80808080u)));
    const Ints minus_x(vreinterpretq_s32_s8(vnegq_s8(vreinterpretq_s8_s32(x.raw))));
    return dot_signed(dot_signed(sum, hn::Xor(codes, top), x), top, minus_x);
  }
};
#endif

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
// Products of neighbours, added in 16 bits.
HWY_INLINE Ints multiply_bytes(Words w, Ints x) {
#if HWY_TARGET == HWY_AVX3
  return Ints{_mm512_maddubs_epi16(w.raw, x.raw)};
#elif HWY_TARGET == HWY_AVX2
  return Ints{_mm256_maddubs_epi16(w.raw, x.raw)};
#else
  return Ints{_mm_maddubs_epi16(w.raw, x.raw)};
#endif
}
HWY_INLINE Ints add_neighbours(Ints pairs) {
#if HWY_TARGET == HWY_AVX3
  return Ints{_mm512_madd_epi16(pairs.raw, _mm512_set1_epi16(1))};
#elif HWY_TARGET == HWY_AVX2
  return Ints{_mm256_madd_epi16(pairs.raw, _mm256_set1_epi16(1))};
#else
  return Ints{_mm_madd_epi16(pairs.raw, _mm_set1_epi16(1))};
#endif
}

// Codes below 128: so many sums of two products fit 16 bits as 2 * 127 times the largest code goes into 32767, and only
// their sum is widened.
template <int kBits>
struct DotPairs : WordWeights {
  static constexpr int kSums = 32767 / (2 * 127 * ((1 << kBits) - 1));
  static HWY_INLINE Ints multiply(Words w, Ints x) { return multiply_bytes(w, x); }
  static HWY_INLINE Ints add(Ints a, Ints b) {
    const hn::Repartition<int16_t, IntLanes> d16;
    return hn::BitCast(IntLanes(), hn::Add(hn::BitCast(d16, a), hn::BitCast(d16, b)));
  }
  static HWY_INLINE Ints total(Ints partial) { return add_neighbours(partial); }
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) { return hn::Add(sum, add_neighbours(multiply_bytes(w, x))); }
};
#endif

#if HWY_TARGET == HWY_AVX3
// For larger codes, products are added in 32 bits only.
template <>
struct DotPairs<8> : WordWeights {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    const Ints even = hn::And(x, hn::Set(IntLanes(), 0x00ff00ff));
    const Ints odd = hn::AndNot(hn::Set(IntLanes(), 0x00ff00ff), x);
    return hn::Add(sum, hn::Add(add_neighbours(multiply_bytes(w, even)), add_neighbours(multiply_bytes(w, odd))));
  }
};
#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
// Larger codes are centered. The magnitude of a weight times x with the weight's sign fits 16 bits as the sum of two,
// 2 * 128 * 127, so that a word takes one multiplication instead of two.
template <>
struct DotPairs<8> {
  static constexpr int kSums = 1;
  struct Weights {
    Words magnitude;
    Ints level;
  };
  static HWY_INLINE Weights weights(Words w) {
    const Ints level = hn::BitCast(IntLanes(), hn::Xor(w, hn::Set(WordLanes(), 0x80808080u)));
    return {magnitude(level), level};
  }
  static HWY_INLINE Ints dot(Ints sum, const Weights& w, Ints x) {
    return hn::Add(sum, add_neighbours(multiply_bytes(w.magnitude, with_sign(x, w.level))));
  }

 private:
#if HWY_TARGET == HWY_AVX2
  static HWY_INLINE Words magnitude(Ints level) { return Words{_mm256_abs_epi8(level.raw)}; }
  static HWY_INLINE Ints with_sign(Ints x, Ints level) { return Ints{_mm256_sign_epi8(x.raw, level.raw)}; }
#else
  static HWY_INLINE Words magnitude(Ints level) { return Words{_mm_abs_epi8(level.raw)}; }
  static HWY_INLINE Ints with_sign(Ints x, Ints level) { return Ints{_mm_sign_epi8(x.raw, level.raw)}; }
#endif
};
#elif HWY_TARGET == HWY_NEON
template <int kBits>
struct DotPairs : WordWeights {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    const int8x16_t values = vreinterpretq_s8_s32(x.raw);
    if constexpr (kBits < 8) {
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
};
#else
template <int>
struct DotPairs : WordWeights {
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
};
#endif

#if HWY_TARGET != HWY_AVX3 && HWY_TARGET != HWY_NEON
template <int kBits>
using DotBytes = DotPairs<kBits>;
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
