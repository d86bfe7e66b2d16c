// SPDX-License-Identifier: Apache-2.0
//
// Weights are unpacked a chunk at a time to one byte a code and f32 scales, in the first-level cache, and used by all
// rows of the task; 8-bit codes are read where they lie. A single row unpacks in registers.
#include "eadem/kernels/cpu/quantized_matmul.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/quantized_matmul.cc"
#include <hwy/foreach_target.h>

#include <hwy/cache_control.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

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

// ---- The dot product of four bytes: sum[n] += sum_j w[n][j] * x[j], w unsigned, x signed and broadcast.

HWY_INLINE Ints broadcast_bytes(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return hn::Set(IntLanes(), word);
}

#if HWY_TARGET == HWY_AVX3
// One instruction, written as such: this code is compiled for processors without it, too, and whoever calls has asked.
template <bool>
struct DotVnni {
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    asm("vpdpbusd %[x], %[w], %[sum]" : [sum] "+v"(sum.raw) : [w] "v"(w.raw), [x] "v"(x.raw));
    return sum;
  }
};
#endif

// Products of neighbours are added in 16 bits. Codes below 128 cannot overflow there; where there are larger ones
// (kBytes) every other product is made alone.
template <bool kBytes>
struct DotPairs {
#if HWY_TARGET == HWY_NEON
  static HWY_INLINE Ints dot(Ints sum, Words w, Ints x) {
    const int8x16_t values = vreinterpretq_s8_s32(x.raw);
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

#if HWY_TARGET != HWY_AVX3
template <bool kBytes>
using DotVnni = DotPairs<kBytes>;
#endif

// ---- Two 16-bit numbers of each output in a word.

// sum_j a[n][j] * b[n][j], exact.
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

// The pairs of bytes of kLanes outputs at p.
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

// ---- Quantizing rows of x.

// Codes, scale and group sums of the 32 values at x. A value that is not finite makes the scale so.
template <int kGroups>
HWY_INLINE void quantize_step(int8_t* codes, float* scale, int32_t* sums, const float* x) {
  const IntLanes di;
  constexpr int kVectors = static_cast<int>(kStep / kLanes);
  // Largest magnitude, compared as integers: NaN is larger than infinity is larger than any number.
  Ints most = hn::Zero(di);
  for (int v = 0; v < kVectors; ++v)
    most = hn::Max(most, hn::And(hn::BitCast(di, load(x + v * kLanes)), hn::Set(di, 0x7fffffff)));
  const int32_t bits = hn::GetLane(hn::MaxOfLanes(di, most));
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  *scale = largest * (1.0f / 127.0f);
  // Below this the reciprocal is not finite; so small a group counts as zero.
  const float inverse = largest > 0x1p-119f && bits < 0x7f800000 ? 127.0f / largest : 0.0f;
  if (inverse == 0.0f && bits < 0x7f800000) *scale = 0.0f;
  int32_t rounded[kStep];
  for (int v = 0; v < kVectors; ++v) {
    const Vec scaled = inverse == 0.0f ? zero() : hn::Mul(load(x + v * kLanes), set(inverse));
    hn::StoreU(hn::NearestInt(scaled), di, rounded + v * kLanes);
  }
  for (int g = 0; g < kGroups; ++g) {
    int32_t sum = 0;
    for (int64_t i = g * (kStep / kGroups); i < (g + 1) * (kStep / kGroups); ++i) {
      codes[i] = static_cast<int8_t>(rounded[i]);
      sum += rounded[i];
    }
    sums[g] = sum;
  }
}

// Rows [begin, end) of x [rows, k_size].
void quantize_row_range(const QuantizedRows& q, const float* x, int64_t x_stride, int64_t k_size, int64_t begin,
                        int64_t end) {
  const bool halves = q.layout->groups() == 2;
  for (int64_t r = begin; r < end; ++r)
    for (int64_t s = 0; s < k_size / kStep; ++s) {
      int32_t sums[kMaxStepGroups];
      const float* values = x + r * x_stride + s * kStep;
      float ordered[kStep];
      if (q.order != nullptr) {
        for (int64_t i = 0; i < kStep; ++i) ordered[i] = x[r * x_stride + q.order[s * kStep + i]];
        values = ordered;
      }
      const int64_t step = q.step(r, s);
      if (!halves) {
        quantize_step<1>(q.codes + step * kStep, q.scales + step, sums, values);
        q.starts[step] = -q.zero() * sums[0];
        q.sums[step] = static_cast<float>(sums[0]);
        continue;
      }
      quantize_step<2>(q.codes + step * kStep, q.scales + step, sums, values);
      if (!q.layout->folded) {
        for (int g = 0; g < 2; ++g) q.starts[step * 2 + g] = -q.zero() * sums[g];
        continue;
      }
      q.starts[step] = -q.zero() * (sums[0] + sums[1]);
      const int32_t factor = q.layout->has_min ? 1 : q.layout->zero;
      q.pairs[step] = (factor * sums[0] & 0xffff) | factor * sums[1] * 0x10000;
    }
}

// ---- Unpacking weights.

template <int kBits>
HWY_INLINE Words field(Words packed, int slot) {
  const Words mask = hn::Set(WordLanes(), 0x01010101u * ((1u << kBits) - 1));
  switch (slot) {  // a shift by zero is no shift
    case 0: return hn::And(packed, mask);
    case 1: return hn::And(hn::ShiftRight<kBits>(packed), mask);
    case 2: return hn::And(hn::ShiftRight<2 * kBits & 31>(packed), mask);
    case 3: return hn::And(hn::ShiftRight<3 * kBits & 31>(packed), mask);
    case 4: return hn::And(hn::ShiftRight<4 * kBits & 31>(packed), mask);
    case 5: return hn::And(hn::ShiftRight<5 * kBits & 31>(packed), mask);
    case 6: return hn::And(hn::ShiftRight<6 * kBits & 31>(packed), mask);
    default: return hn::And(hn::ShiftRight<7 * kBits & 31>(packed), mask);
  }
}

HWY_INLINE Words look_up(const uint8_t* table, Words codes) {
#if HWY_TARGET == HWY_SCALAR
  uint32_t word = hn::GetLane(codes), result = 0;
  for (int j = 0; j < 4; ++j) result |= static_cast<uint32_t>(table[word >> (8 * j) & 15]) << (8 * j);
  return hn::Set(WordLanes(), result);
#else
  const hn::Repartition<uint8_t, WordLanes> d8;
  return hn::BitCast(WordLanes(), hn::TableLookupBytes(hn::LoadDup128(d8, table), hn::BitCast(d8, codes)));
#endif
}

// How a step's codes lie: kLow bits of each in kLow vectors, then kHigh more in kHigh vectors; kTable: they are
// indices.
template <int kLow, int kHigh, bool kTable>
struct CodeFields {
  static constexpr int64_t kBytes = 64 * (kLow + kHigh);
  static constexpr bool kWholeBytes = kLow == 8 || kTable;

  // Loads what kLanes outputs, the first being `lane`, have in the step at `quants`.
  HWY_INLINE CodeFields(const uint8_t* quants, int64_t lane) {
#pragma GCC unroll 16
    for (int i = 0; i < kLow; ++i) low[i] = load_words(quants + i * 64 + lane * 4);
#pragma GCC unroll 16
    for (int i = 0; i < kHigh; ++i) high[i] = load_words(quants + (kLow + i) * 64 + lane * 4);
  }

  // Vector i of the step, one byte a code.
  HWY_INLINE Words codes(int i, const uint8_t* table) const {
    if constexpr (kLow == 8) return low[i];
    Words word = field<kLow>(low[i % kLow], i / kLow);
    if constexpr (kHigh > 0) word = hn::Or(word, hn::ShiftLeft<kLow>(field<kHigh>(high[i % kHigh], i / kHigh)));
    if constexpr (kTable) word = look_up(table, word);
    return word;
  }

  Words low[kLow];
  Words high[kHigh == 0 ? 1 : kHigh];
};

// What the code of a layout depends on.
template <typename FieldsT, QuantizedLayout::Scales kScalesValue, int kGroupsValue, bool kMinValue>
struct StepFormat {
  using Fields = FieldsT;
  using Scales = QuantizedLayout::Scales;
  static constexpr Scales kScales = kScalesValue;
  static constexpr int kGroups = kGroupsValue;
  static constexpr bool kMin = kMinValue;
  static constexpr bool kSupers = kScales == Scales::bytes || kScales == Scales::nibbles;
  static constexpr bool kFolded = kGroups == 2 && FieldsT::kBytes < 256;          // 2 and 3 bits
  static constexpr int kDots = kFolded ? 1 : kGroups;                             // sums of a step in a tile
  static constexpr bool kTileBytes = FieldsT::kWholeBytes || (kFolded && !kMin);  // codes there may be 128 or more
  static constexpr bool kExpanded = kScales == Scales::groups;                    // f32 scales and mins, in the scratch
  static constexpr int64_t kScaleBytes =
      kExpanded ? kPanelWidth * static_cast<int64_t>(sizeof(float))
                : kPanelWidth * (kSupers ? 1 : 2) * kGroups * (kMin && kScales != Scales::nibbles ? 2 : 1);
};

// Calls f with the StepFormat of `layout`: layout_of has the same list.
template <typename Function>
HWY_INLINE void with_format(const QuantizedLayout& layout, Function f) {
  using S = QuantizedLayout::Scales;
  switch (layout.code_bits) {
    case 2: return f(StepFormat<CodeFields<2, 0, false>, S::nibbles, 2, true>());
    case 3: return f(StepFormat<CodeFields<2, 1, false>, S::bytes, 2, false>());
    case 4:
      if (layout.has_table) {
        if (layout.scales == S::f16) return f(StepFormat<CodeFields<4, 0, true>, S::f16, 1, false>());
        if (layout.scales == S::bf16) return f(StepFormat<CodeFields<4, 0, true>, S::bf16, 1, false>());
        return f(StepFormat<CodeFields<4, 0, true>, S::bytes, 1, false>());
      }
      if (layout.scales == S::groups && layout.has_min)
        return f(StepFormat<CodeFields<4, 0, false>, S::groups, 1, true>());
      if (layout.scales == S::groups) return f(StepFormat<CodeFields<4, 0, false>, S::groups, 1, false>());
      if (layout.scales == S::bytes) return f(StepFormat<CodeFields<4, 0, false>, S::bytes, 1, true>());
      if (layout.has_min) return f(StepFormat<CodeFields<4, 0, false>, S::f16, 1, true>());
      return f(StepFormat<CodeFields<4, 0, false>, S::f16, 1, false>());
    case 5:
      if (layout.scales == S::bytes) return f(StepFormat<CodeFields<4, 1, false>, S::bytes, 1, true>());
      if (layout.has_min) return f(StepFormat<CodeFields<4, 1, false>, S::f16, 1, true>());
      return f(StepFormat<CodeFields<4, 1, false>, S::f16, 1, false>());
    case 6: return f(StepFormat<CodeFields<4, 2, false>, S::bytes, 2, false>());
    default:
      if (layout.scales == S::groups && layout.has_min)
        return f(StepFormat<CodeFields<8, 0, false>, S::groups, 1, true>());
      if (layout.scales == S::groups) return f(StepFormat<CodeFields<8, 0, false>, S::groups, 1, false>());
      return f(StepFormat<CodeFields<8, 0, false>, S::f16, 1, false>());
  }
}

HWY_INLINE Ints load_bytes(const uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(IntLanes(), *p);
#else
  return hn::PromoteTo(IntLanes(), hn::LoadU(hn::Rebind<uint8_t, Lanes>(), p));
#endif
}
HWY_INLINE Ints load_signed_bytes(const uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(IntLanes(), static_cast<int8_t>(*p));
#else
  return hn::PromoteTo(IntLanes(), hn::LoadU(hn::Rebind<int8_t, Lanes>(), reinterpret_cast<const int8_t*>(p)));
#endif
}

// In the scratch, mins stand so many floats behind the scales of their step.
inline constexpr int64_t kMinsBehind = kChunkSteps * kMaxStepGroups * kPanelWidth;

// The super-scale and super-min of kLanes outputs.
struct Supers {
  Vec scale, min;
};
template <typename Format>
HWY_INLINE Supers load_supers(const f16_t* supers, int64_t lane) {
  if constexpr (!Format::kSupers) return {zero(), zero()};
  return {load(supers + lane), Format::kMin ? load(supers + kPanelWidth + lane) : zero()};
}

// The scales of kLanes outputs in one step, from the bytes of the step.
template <typename Format>
struct StepScales {
  HWY_INLINE StepScales(const uint8_t* bytes, int64_t lane, const Supers& supers) {
    using Scales = QuantizedLayout::Scales;
    if constexpr (Format::kScales == Scales::nibbles) {
      const Ints both = load_pairs(bytes + 2 * lane);
      pair = hn::And(both, hn::Set(IntLanes(), 0x000f000f));
      min_pair = hn::And(hn::ShiftRight<4>(both), hn::Set(IntLanes(), 0x000f000f));
      scale[0] = supers.scale;
      min = supers.min;
    } else if constexpr (Format::kFolded) {
      pair = load_signed_pairs(bytes + 2 * lane);
      scale[0] = supers.scale;
    } else if constexpr (Format::kGroups == 2) {
      const Ints both = load_signed_pairs(bytes + 2 * lane);
      const Ints low = hn::ShiftRight<16>(hn::ShiftLeft<16>(both));
      scale[0] = hn::Mul(supers.scale, hn::ConvertTo(Lanes(), low));
      scale[1] = hn::Mul(supers.scale, hn::ConvertTo(Lanes(), hn::ShiftRight<16>(both)));
    } else if constexpr (Format::kSupers) {
      scale[0] = hn::Mul(supers.scale, hn::ConvertTo(Lanes(), load_signed_bytes(bytes + lane)));
      if constexpr (Format::kMin)
        min = hn::Mul(supers.min, hn::ConvertTo(Lanes(), load_bytes(bytes + kPanelWidth + lane)));
    } else if constexpr (Format::kExpanded) {
      const auto* stored = reinterpret_cast<const float*>(bytes) + lane;
      scale[0] = load(stored);
      if constexpr (Format::kMin) min = load(stored + kMinsBehind);
    } else {
      using Stored = std::conditional_t<Format::kScales == Scales::bf16, bf16_t, f16_t>;
      const auto* stored = reinterpret_cast<const Stored*>(bytes) + lane;
      scale[0] = load(stored);
      if constexpr (Format::kMin) min = load(stored + kPanelWidth);
    }
  }

  Vec scale[Format::kDots];
  Vec min;
  Ints pair, min_pair;  // folded: sub-scales and sub-mins of both groups
};

// Bytes of a group of a folded layout: codes times `sub_scale`, two copies of an i16 in each word; without mins plus
// 124 - zero * sub_scale. Two bytes are made at a time: modulo 2^16 what one adds to the other cancels, since both end
// up in 0 … 255.
template <bool kMin>
HWY_INLINE Words fold(Words codes, Words sub_scale, int zero) {
#if HWY_TARGET == HWY_SCALAR
  uint32_t word = hn::GetLane(codes), result = 0;
  const int factor = static_cast<int16_t>(hn::GetLane(sub_scale));
  for (int j = 0; j < 32; j += 8) {
    const int code = static_cast<int>(word >> j & 0xff);
    result |= static_cast<uint32_t>(kMin ? code * factor : (code - zero) * factor + 124) << j;
  }
  return hn::Set(WordLanes(), result);
#else
  const hn::Repartition<uint16_t, WordLanes> d16;
  const auto factor = hn::BitCast(d16, sub_scale);
  auto bytes = hn::Mul(hn::BitCast(d16, codes), factor);
  if constexpr (!kMin) {
    const auto above = hn::Sub(hn::Set(d16, 124), hn::Mul(hn::Set(d16, static_cast<uint16_t>(zero)), factor));
    bytes = hn::Add(bytes, hn::Add(above, hn::ShiftLeft<8>(above)));
  }
  return hn::BitCast(WordLanes(), bytes);
#endif
}

// Hardware prefetch alone does not keep up with the panels that are read side by side.
inline constexpr int64_t kPrefetchQuants = 1024, kPrefetchScaleSteps = 8;

template <typename Format>
HWY_INLINE void prefetch_step(const uint8_t* quants, const uint8_t* scales) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < Format::Fields::kBytes; i += 64) hwy::Prefetch(quants + kPrefetchQuants + i);
  hwy::Prefetch(scales + kPrefetchScaleSteps * Format::kScaleBytes);
}

// Where a panel's part of the scratch holds its chunk, unpacked.
inline constexpr int64_t kScratchFloats = kChunkScratchBytes / static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kScalesAt = kChunkSteps * kStepBytes / static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kMinsAt = kScalesAt + kMinsBehind;
inline constexpr int64_t kMinPairsAt = kMinsAt + kChunkSteps * kPanelWidth;

// Of a panel in groups, the scales of steps [s0, s0 + steps) and, with zero points, the mins: scale * (zero - middle).
// Where unpack_chunk puts them; it finds them there.
template <typename Format>
void expand_groups(float* scratch, const QuantizedWeight& w, int64_t all_steps, int64_t p, int64_t s0, int64_t steps) {
  const QuantizedLayout& layout = *w.layout;
  const int64_t group_steps = layout.group_steps == 0 ? all_steps : layout.group_steps;
  const int64_t first = p * (all_steps / group_steps);
  const auto expand = [&](const auto* stored) {
    for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
      Vec scale = zero(), min = zero();
      for (int64_t s = 0; s < steps; ++s) {
        if (s == 0 || (s0 + s) % group_steps == 0) {
          const int64_t at = (first + (s0 + s) / group_steps) * kPanelWidth + n;
          scale = load(stored + at);
          if constexpr (Format::kMin) {
            const Ints above = hn::Sub(load_bytes(w.zeros + at), hn::Set(IntLanes(), layout.zero));
            min = hn::Mul(scale, hn::ConvertTo(Lanes(), above));
          }
        }
        store(scale, scratch + kScalesAt + s * kPanelWidth + n);
        if constexpr (Format::kMin) store(min, scratch + kMinsAt + s * kPanelWidth + n);
      }
    }
  };
  switch (layout.group_scales) {
    case DType::f16: return expand(reinterpret_cast<const f16_t*>(w.scales));
    case DType::bf16: return expand(reinterpret_cast<const bf16_t*>(w.scales));
    default: return expand(reinterpret_cast<const float*>(w.scales));
  }
}

// Unpacks a chunk into the scratch: codes [steps, 8, 16, 4] (unless they are bytes as they lie), scales
// [steps, dots, 16] and mins [steps, 16], of folded layouts with their pairs [steps, 16].
template <typename Format>
void unpack_chunk(float* scratch, const uint8_t* quants, const uint8_t* scale_bytes, const f16_t* supers, int64_t steps,
                  const uint8_t* table, int zero) {
  using Fields = typename Format::Fields;
  auto* codes = reinterpret_cast<uint8_t*>(scratch);
  float *scales = scratch + kScalesAt, *mins = scratch + kMinsAt, *min_pairs = scratch + kMinPairsAt;
  for (int64_t s = 0; s < steps; ++s) {
    prefetch_step<Format>(quants, scale_bytes);
#pragma GCC unroll 16
    for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
      const StepScales<Format> step(scale_bytes, n, load_supers<Format>(supers, n));
#pragma GCC unroll 2
      for (int g = 0; g < Format::kDots; ++g) store(step.scale[g], scales + g * kPanelWidth + n);
      if constexpr (Format::kMin) store(step.min, mins + n);
      if constexpr (Format::kMin && Format::kFolded) store(hn::BitCast(Lanes(), step.min_pair), min_pairs + n);
      if constexpr (Fields::kBytes < kStepBytes) {
        const Fields fields(quants, n);
        Words low = hn::Zero(WordLanes()), high = low;
        if constexpr (Format::kFolded) {
          low = hn::BitCast(WordLanes(), pair_of(step.pair, step.pair));
          high = hn::BitCast(WordLanes(), pair_of(hn::ShiftRight<16>(step.pair), hn::ShiftRight<16>(step.pair)));
        }
#pragma GCC unroll 16
        for (int i = 0; i < kStepVectors; ++i) {
          Words bytes = fields.codes(i, table);
          if constexpr (Format::kFolded) bytes = fold<Format::kMin>(bytes, i < kStepVectors / 2 ? low : high, zero);
          store_words(bytes, codes + i * 64 + n * 4);
        }
      }
    }
    codes += kStepBytes;
    quants += Fields::kBytes;
    scale_bytes += Format::kScaleBytes;
    scales += Format::kDots * kPanelWidth;
    mins += kPanelWidth;
    min_pairs += kPanelWidth;
  }
}

// ---- The tile.

// A chunk of one panel, unpacked.
struct UnpackedChunk {
  const uint8_t* codes;  // [steps, 8, 16, 4]
  const float* scratch;  // its scales and mins
};

// Panels that one row reads side by side.
inline constexpr int kQuantizedRowPanels = HWY_TARGET == HWY_SCALAR ? 1 : 4;

// A tile keeps groups x rows x vectors integer sums in registers; the f32 chains stay in c, in the first-level cache.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kQuantizedRows = 12, kQuantizedPanels = 2;  // 24 + 2 + 1 of 32
#elif HWY_TARGET == HWY_NEON
inline constexpr int kQuantizedRows = 4, kQuantizedPanels = 1;  // 16 + 4 + 1 of 32
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kQuantizedRows = 2, kQuantizedPanels = 1;
#else
inline constexpr int kQuantizedRows = HWY_TARGET == HWY_AVX2 ? 4 : 2, kQuantizedPanels = 1;  // 8 + 2 + 3 of 16
#endif

// What one step adds to a chain. `scales` is what StepScales holds of it.
template <typename Format>
HWY_INLINE Vec add_step(Vec acc, const Ints* sums, float x_scale, const Vec* scales) {
  Vec f = hn::Mul(hn::ConvertTo(Lanes(), sums[0]), scales[0]);
  if constexpr (Format::kDots == 2) f = hn::MulAdd(hn::ConvertTo(Lanes(), sums[1]), scales[1], f);
  return hn::MulAdd(set(x_scale), f, acc);
}
// With a min that `x_sum` is to be multiplied by.
template <typename Format>
HWY_INLINE Vec add_step(Vec acc, const Ints* sums, float x_scale, const Vec* scales, Vec x_sum, Vec min) {
  const Vec f = hn::Mul(hn::ConvertTo(Lanes(), sums[0]), scales[0]);
  return hn::MulAdd(set(x_scale), hn::NegMulAdd(x_sum, min, f), acc);
}

// c [kRows, kPanels * 16] += rows r0 … of x times the chunks w, which begin at step s0.
template <typename Dot, typename Format, int kRows, int kPanels>
HWY_NOINLINE void quantized_tile(float* HWY_RESTRICT c, int64_t c_stride, const QuantizedRows& x, int64_t r0,
                                 const UnpackedChunk* w, int64_t s0, int64_t steps) {
  constexpr int kPanelVectors = static_cast<int>(kPanelWidth / kLanes);
  constexpr int kVecs = kPanels * kPanelVectors, kDots = Format::kDots;
  constexpr int kDotVectors = static_cast<int>(kStepVectors) / kDots;
  const int64_t first = x.step(r0, s0);
  const int8_t* x_codes = x.codes + first * kStep;
  const float* x_scales = x.scales + first;
  const int32_t* x_starts = x.starts + first * kDots;
  const float* x_sums = x.sums + first;
  const int32_t* x_pairs = x.pairs + first;
  for (int64_t s = 0; s < steps; ++s) {
    Ints sum[kRows][kVecs][kDots];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int g = 0; g < kDots; ++g) {
        const Ints start = hn::Set(IntLanes(), x_starts[(r * kChunkSteps + s) * kDots + g]);
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) sum[r][v][g] = start;
      }
#pragma GCC unroll 16
    for (int i = 0; i < kStepVectors; ++i) {
      Words words[kVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v)
        words[v] = load_words(w[v / kPanelVectors].codes + s * kStepBytes + i * 64 + v % kPanelVectors * kLanes * 4);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Ints bytes = broadcast_bytes(x_codes + (r * kChunkSteps + s) * kStep + i * 4);
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v)
          sum[r][v][i / kDotVectors] = Dot::dot(sum[r][v][i / kDotVectors], words[v], bytes);
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const float* scratch = w[v / kPanelVectors].scratch + v % kPanelVectors * kLanes;
      Vec scales[kDots];
#pragma GCC unroll 2
      for (int g = 0; g < kDots; ++g) scales[g] = load(scratch + kScalesAt + (s * kDots + g) * kPanelWidth);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int64_t step = r * kChunkSteps + s;
        float* acc = c + r * c_stride + v * kLanes;
        if constexpr (!Format::kMin) {
          store(add_step<Format>(load(acc), sum[r][v], x_scales[step], scales), acc);
          continue;
        }
        Vec x_sum;
        if constexpr (Format::kFolded) {
          const Ints min_pairs = hn::BitCast(IntLanes(), load(scratch + kMinPairsAt + s * kPanelWidth));
          x_sum = hn::ConvertTo(Lanes(), dot_pairs(min_pairs, hn::Set(IntLanes(), x_pairs[step])));
        } else {
          x_sum = set(x_sums[step]);
        }
        const Vec min = load(scratch + kMinsAt + s * kPanelWidth);
        store(add_step<Format>(load(acc), sum[r][v], x_scales[step], scales, x_sum, min), acc);
      }
    }
  }
}

// All rows of `kPanels` panels, in tiles as tall as registers allow, then in smaller ones.
template <typename Dot, typename Format, int kPanels>
void quantized_rows(float* c, int64_t c_stride, const QuantizedRows& x, int64_t r0, int64_t rows,
                    const UnpackedChunk* w, int64_t s0, int64_t steps) {
  constexpr int kMaxRows = kQuantizedRows / Format::kDots;
  const auto tiles = [&](auto size) {
    constexpr int kRows = decltype(size)::value;
    if constexpr (kRows <= kMaxRows)
      for (; rows >= kRows; rows -= kRows, r0 += kRows, c += kRows * c_stride)
        quantized_tile<Dot, Format, kRows, kPanels>(c, c_stride, x, r0, w, s0, steps);
  };
  tiles(std::integral_constant<int, kMaxRows>());
  if constexpr (kMaxRows != 8) tiles(std::integral_constant<int, 8>());
  if constexpr (kMaxRows != 4) tiles(std::integral_constant<int, 4>());
  if constexpr (kMaxRows != 2) tiles(std::integral_constant<int, 2>());
  if constexpr (kMaxRows != 1) tiles(std::integral_constant<int, 1>());
}

// All panels of a group, in tiles of kQuantizedPanels, then of one.
template <typename Dot, typename Format>
void quantized_panels(float* c, const QuantizedRows& x, int64_t r0, int64_t rows, const UnpackedChunk* w,
                      int64_t panels, int64_t s0, int64_t steps) {
  const int64_t c_stride = panels * kPanelWidth;
  int64_t p = 0;
  for (; p + kQuantizedPanels <= panels; p += kQuantizedPanels)
    quantized_rows<Dot, Format, kQuantizedPanels>(c + p * kPanelWidth, c_stride, x, r0, rows, w + p, s0, steps);
  if constexpr (kQuantizedPanels > 1)
    for (; p < panels; ++p)
      quantized_rows<Dot, Format, 1>(c + p * kPanelWidth, c_stride, x, r0, rows, w + p, s0, steps);
}

// ---- One row: codes and scales are unpacked in registers as they are read, since nobody else wants them.

// A chunk of kPanels panels side by side: where the first begins, and how far apart they are.
struct PackedChunk {
  const uint8_t *quants, *scales;
  const f16_t* supers;
  int64_t quants_stride, scales_stride, supers_stride;
};

// c [kPanels * 16] += the row of x times the chunk, which begins at step s0.
template <typename Dot, typename Format, int kPanels>
HWY_NOINLINE void quantized_row(float* HWY_RESTRICT c, const QuantizedRows& x, const PackedChunk& w, int64_t s0,
                                int64_t steps, const uint8_t* table) {
  using Fields = typename Format::Fields;
  constexpr int kGroups = Format::kGroups, kGroupVectors = static_cast<int>(kStepVectors) / kGroups;
  const int64_t first = x.step(0, s0);
  for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
    Vec acc[kPanels];
    Supers supers[kPanels];
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      acc[p] = load(c + p * kPanelWidth + n);
      supers[p] = load_supers<Format>(w.supers + p * w.supers_stride, n);
    }
    const uint8_t *quants = w.quants, *scales = w.scales;
    for (int64_t s = 0; s < steps; ++s, quants += Fields::kBytes, scales += Format::kScaleBytes) {
      const int64_t step = first + s;
      const int8_t* x_codes = x.codes + step * kStep;
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* panel_quants = quants + p * w.quants_stride;
        const uint8_t* panel_scales = scales + p * w.scales_stride;
        if (n == 0) prefetch_step<Format>(panel_quants, panel_scales);
        const Fields fields(panel_quants, n);
        Ints sums[kGroups];
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g)
          sums[g] = Format::kFolded ? hn::Zero(IntLanes()) : hn::Set(IntLanes(), x.starts[step * kGroups + g]);
#pragma GCC unroll 16
        for (int i = 0; i < kStepVectors; ++i)
          sums[i / kGroupVectors] =
              Dot::dot(sums[i / kGroupVectors], fields.codes(i, table), broadcast_bytes(x_codes + i * 4));
        const StepScales<Format> scale(panel_scales, n, supers[p]);
        if constexpr (Format::kFolded) {
          const Ints x_pairs = hn::Set(IntLanes(), x.pairs[step]);
          Ints pair = pair_of(sums[0], sums[1]);
          if constexpr (Format::kMin) {
            sums[0] = dot_pairs(pair, scale.pair);
            const Vec x_sum = hn::ConvertTo(Lanes(), dot_pairs(x_pairs, scale.min_pair));
            acc[p] = add_step<Format>(acc[p], sums, x.scales[step], scale.scale, x_sum, scale.min);
          } else {
            sums[0] = hn::Sub(dot_pairs(pair, scale.pair), dot_pairs(x_pairs, scale.pair));
            acc[p] = add_step<Format>(acc[p], sums, x.scales[step], scale.scale);
          }
        } else if constexpr (Format::kMin) {
          acc[p] = add_step<Format>(acc[p], sums, x.scales[step], scale.scale, set(x.sums[step]), scale.min);
        } else {
          acc[p] = add_step<Format>(acc[p], sums, x.scales[step], scale.scale);
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) store(acc[p], c + p * kPanelWidth + n);
  }
}

// All panels of a group.
template <typename Dot, typename Format>
void quantized_row_panels(float* c, const QuantizedRows& x, PackedChunk w, int64_t panels, int64_t s0, int64_t steps,
                          const uint8_t* table) {
  const auto some = [&](auto count) {
    constexpr int kPanels = decltype(count)::value;
    for (; panels >= kPanels; panels -= kPanels, c += kPanels * kPanelWidth) {
      quantized_row<Dot, Format, kPanels>(c, x, w, s0, steps, table);
      w.quants += kPanels * w.quants_stride;
      w.scales += kPanels * w.scales_stride;
      w.supers += kPanels * w.supers_stride;
    }
  };
  some(std::integral_constant<int, kQuantizedRowPanels>());
  if constexpr (kQuantizedRowPanels > 1) some(std::integral_constant<int, 1>());
}

// ---- The product.

template <template <bool> typename Dot, typename Format>
void product_of_format(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                       int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  using Fields = typename Format::Fields;
  const uint8_t* table = w.layout->table.data();
  const int64_t all_steps = k_size / kStep;
  PackedChunk chunk{};
  chunk.quants_stride = all_steps * Fields::kBytes;
  chunk.scales_stride =
      Format::kExpanded ? kScratchFloats * static_cast<int64_t>(sizeof(float)) : all_steps * Format::kScaleBytes;
  chunk.supers_stride = Format::kSupers ? all_steps / kChunkSteps * w.layout->super_columns() * kPanelWidth : 0;
  for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, all_steps - s0);
    chunk.quants = w.quants + p0 * chunk.quants_stride + s0 * Fields::kBytes;
    if constexpr (Format::kExpanded) {
      for (int64_t p = 0; p < panels; ++p)
        expand_groups<Format>(scratch + p * kScratchFloats, w, all_steps, p0 + p, s0, steps);
      chunk.scales = reinterpret_cast<const uint8_t*>(scratch + kScalesAt);
    } else {
      chunk.scales = w.scales + p0 * chunk.scales_stride + s0 * Format::kScaleBytes;
    }
    if constexpr (Format::kSupers)
      chunk.supers =
          w.super_scales + p0 * chunk.supers_stride + s0 / kChunkSteps * w.layout->super_columns() * kPanelWidth;
    if (x.rows == 1) {
      quantized_row_panels<Dot<Fields::kWholeBytes>, Format>(c, x, chunk, panels, s0, steps, table);
      continue;
    }
    UnpackedChunk unpacked[kMaxGroupPanels];
    for (int64_t p = 0; p < panels; ++p) {
      float* panel_scratch = scratch + p * kScratchFloats;
      const uint8_t* quants = chunk.quants + p * chunk.quants_stride;
      unpack_chunk<Format>(panel_scratch, quants, chunk.scales + p * chunk.scales_stride,
                           chunk.supers + p * chunk.supers_stride, steps, table, w.layout->zero);
      unpacked[p] = {Fields::kBytes < kStepBytes ? reinterpret_cast<const uint8_t*>(panel_scratch) : quants,
                     panel_scratch};
    }
    quantized_panels<Dot<Format::kTileBytes>, Format>(c, x, r0, rows, unpacked, panels, s0, steps);
  }
}

template <template <bool> typename Dot>
void product_with(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0, int64_t rows,
                  int64_t p0, int64_t panels, float* scratch) {
  std::memset(c, 0, static_cast<size_t>(rows * panels * kPanelWidth) * sizeof(float));
  with_format(*w.layout, [&](auto format) {
    using Format = decltype(format);
    product_of_format<Dot, Format>(c, x, w, k_size, r0, rows, p0, panels, scratch);
  });
}

void product(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0, int64_t rows,
             int64_t p0, int64_t panels, float* scratch) {
  product_with<DotPairs>(c, x, w, k_size, r0, rows, p0, panels, scratch);
}

// The same on processors of this target that have the 8-bit dot product.
void product_vnni(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0, int64_t rows,
                  int64_t p0, int64_t panels, float* scratch) {
  product_with<DotVnni>(c, x, w, k_size, r0, rows, p0, panels, scratch);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(quantize_row_range);
HWY_EXPORT(product);
HWY_EXPORT(product_vnni);

namespace {
int64_t padded_steps(int64_t rows, int64_t k_size) {
  return rows * ((k_size / kStep + kChunkSteps - 1) / kChunkSteps * kChunkSteps);
}
}  // namespace

int64_t quantized_rows_bytes(int64_t rows, int64_t k_size) {
  return padded_steps(rows, k_size) * (kStep + static_cast<int64_t>(sizeof(float)) * (1 + 2 * kMaxStepGroups));
}

QuantizedRows quantized_rows_in(void* base, const QuantizedLayout& layout, int64_t rows, int64_t k_size) {
  const int64_t steps = padded_steps(rows, k_size);
  QuantizedRows q{};
  q.rows = rows;
  q.layout = &layout;
  q.codes = static_cast<int8_t*>(base);
  q.scales = reinterpret_cast<float*>(q.codes + steps * kStep);
  q.starts = reinterpret_cast<int32_t*>(q.scales + steps);
  q.sums = reinterpret_cast<float*>(q.starts + steps * q.dots());
  q.pairs = q.starts + steps * q.dots();  // a layout has either
  return q;
}

void quantize_rows(CpuDevice& device, const QuantizedRows& q, const float* x, int64_t x_stride, int64_t k_size) {
  const auto quantize = EADEM_CPU_DISPATCH(quantize_row_range, device.isa());
  // A few microseconds of work are not worth waking anyone.
  device.pool().parallel_ranges(q.rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(k_size, 1)),
                                [&](int64_t begin, int64_t end) { quantize(q, x, x_stride, k_size, begin, end); });
}

QuantizedProduct quantized_product(Isa isa) {
  return isa == Isa::avx512_vnni ? EADEM_CPU_DISPATCH(product_vnni, isa) : EADEM_CPU_DISPATCH(product, isa);
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
