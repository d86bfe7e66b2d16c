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
  for (int64_t r = begin; r < end; ++r)
    for (int64_t s = 0; s < k_size / kStep; ++s) {
      int32_t sums[kMaxStepGroups];
      const float* values = x + r * x_stride + s * kStep;
      const int64_t step = q.step(r, s);
      if (q.groups == 1)
        quantize_step<1>(q.codes + step * kStep, q.scales + step, sums, values);
      else
        quantize_step<2>(q.codes + step * kStep, q.scales + step, sums, values);
      for (int64_t g = 0; g < q.groups; ++g) {
        q.starts[step * q.groups + g] = -q.offset * sums[g];
        q.sums[step * q.groups + g] = static_cast<float>(sums[g]);
      }
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
template <typename FieldsT, int kGroupsValue, bool kMinValue>
struct StepFormat {
  using Fields = FieldsT;
  static constexpr int kGroups = kGroupsValue;
  static constexpr bool kMin = kMinValue;
  static constexpr bool kBytes = FieldsT::kWholeBytes;  // codes may be 128 or more
};

// Calls f with the StepFormat of `layout`: one for each combination that a block type has (layout_of checks that there
// is one).
template <typename Function>
HWY_INLINE void with_format(const QuantizedLayout& layout, Function f) {
  switch (layout.code_bits) {
    case 2: return f(StepFormat<CodeFields<2, 0, false>, 2, true>());
    case 3: return f(StepFormat<CodeFields<2, 1, false>, 2, false>());
    case 4:
      if (layout.has_table) return f(StepFormat<CodeFields<4, 0, true>, 1, false>());
      if (layout.has_min) return f(StepFormat<CodeFields<4, 0, false>, 1, true>());
      return f(StepFormat<CodeFields<4, 0, false>, 1, false>());
    case 5:
      if (layout.has_min) return f(StepFormat<CodeFields<4, 1, false>, 1, true>());
      return f(StepFormat<CodeFields<4, 1, false>, 1, false>());
    case 6: return f(StepFormat<CodeFields<4, 2, false>, 2, false>());
    default: return f(StepFormat<CodeFields<8, 0, false>, 1, false>());
  }
}

// Hardware prefetch alone does not keep up with the panels that are read side by side.
inline constexpr int64_t kPrefetchQuants = 1024;

template <typename Fields>
void unpack_steps(uint8_t* codes, const uint8_t* quants, int64_t steps, const uint8_t* table) {
  for (int64_t s = 0; s < steps; ++s, codes += kStepBytes, quants += Fields::kBytes) {
    for (int64_t i = 0; i < Fields::kBytes; i += 64) hwy::Prefetch(quants + kPrefetchQuants + i);
#pragma GCC unroll 16
    for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
      const Fields fields(quants, n);
#pragma GCC unroll 16
      for (int i = 0; i < kStepVectors; ++i) store_words(fields.codes(i, table), codes + i * 64 + n * 4);
    }
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

// The f32 scales (and mins) of steps [s0, s0 + steps) of a panel: [steps, groups, 16].
void expand_scales(float* scales, float* mins, const QuantizedLayout& layout, const uint8_t* panel_scales,
                   const f16_t* panel_supers, int64_t s0, int64_t steps) {
  using Scales = QuantizedLayout::Scales;
  const int64_t columns = layout.scale_columns();
  if (!layout.has_super_scales) {
    const auto expand = [&](const auto* stored) {
      for (int64_t s = 0; s < steps; ++s)
        for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
          const auto* at = stored + (s0 + s) * columns * kPanelWidth + n;
          store(load(at), scales + s * kPanelWidth + n);
          if (layout.has_min) store(load(at + kPanelWidth), mins + s * kPanelWidth + n);
        }
    };
    if (layout.scales == Scales::bf16) return expand(reinterpret_cast<const bf16_t*>(panel_scales));
    return expand(reinterpret_cast<const f16_t*>(panel_scales));
  }
  const int64_t groups = layout.groups(), block_steps = layout.block_size / kStep;
  for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
    for (int64_t s = 0; s < steps;) {
      const int64_t block = (s0 + s) / block_steps;
      const int64_t end = std::min(steps, (block + 1) * block_steps - s0);
      const f16_t* super = panel_supers + block * layout.super_columns() * kPanelWidth + n;
      const Vec scale = load(super);
      const Vec min = layout.has_min ? load(super + kPanelWidth) : zero();
      for (; s < end; ++s)
        for (int64_t g = 0; g < groups; ++g) {
          const uint8_t* sub = panel_scales + ((s0 + s) * groups + g) * columns * kPanelWidth + n;
          float* out = scales + (s * groups + g) * kPanelWidth + n;
          float* out_min = mins + (s * groups + g) * kPanelWidth + n;
          if (layout.scales == Scales::nibbles) {
            const Ints both = load_bytes(sub);
            store(hn::Mul(scale, hn::ConvertTo(Lanes(), hn::And(both, hn::Set(IntLanes(), 15)))), out);
            store(hn::Mul(min, hn::ConvertTo(Lanes(), hn::ShiftRight<4>(both))), out_min);
          } else {
            store(hn::Mul(scale, hn::ConvertTo(Lanes(), load_signed_bytes(sub))), out);
            if (layout.has_min) store(hn::Mul(min, hn::ConvertTo(Lanes(), load_bytes(sub + kPanelWidth))), out_min);
          }
        }
    }
  }
}

// ---- The tile.

// A chunk of one panel, unpacked.
struct UnpackedChunk {
  const uint8_t* codes;  // [steps, 8, 16, 4]
  const float* scales;   // [steps, groups, 16]
  const float* mins;     // likewise
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

// What one step adds to a chain.
template <int kGroups, bool kMin>
HWY_INLINE Vec add_step(Vec acc, const Ints* sums, float x_scale, const float* x_sums, const float* scales,
                        const float* mins) {
  Vec f = hn::Mul(hn::ConvertTo(Lanes(), sums[0]), load(scales));
  if constexpr (kGroups == 2) f = hn::MulAdd(hn::ConvertTo(Lanes(), sums[1]), load(scales + kPanelWidth), f);
  if constexpr (kMin) {
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) f = hn::NegMulAdd(set(x_sums[g]), load(mins + g * kPanelWidth), f);
  }
  return hn::MulAdd(set(x_scale), f, acc);
}

// c [kRows, kPanels * 16] += rows r0 … of x times the chunks w, which begin at step s0.
template <typename Dot, int kGroups, bool kMin, int kRows, int kPanels>
HWY_NOINLINE void quantized_tile(float* HWY_RESTRICT c, int64_t c_stride, const QuantizedRows& x, int64_t r0,
                                 const UnpackedChunk* w, int64_t s0, int64_t steps) {
  constexpr int kPanelVectors = static_cast<int>(kPanelWidth / kLanes);
  constexpr int kVecs = kPanels * kPanelVectors;
  constexpr int kDots = static_cast<int>(kStepVectors) / kGroups;
  const int64_t first = x.step(r0, s0);
  const int8_t* x_codes = x.codes + first * kStep;
  const float* x_scales = x.scales + first;
  const int32_t* x_starts = x.starts + first * kGroups;
  const float* x_sums = x.sums + first * kGroups;
  for (int64_t s = 0; s < steps; ++s) {
    Ints sum[kRows][kVecs][kGroups];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int g = 0; g < kGroups; ++g) {
        const Ints start = hn::Set(IntLanes(), x_starts[(r * kChunkSteps + s) * kGroups + g]);
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
        for (int v = 0; v < kVecs; ++v) sum[r][v][i / kDots] = Dot::dot(sum[r][v][i / kDots], words[v], bytes);
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const int64_t column = s * kGroups * kPanelWidth + v % kPanelVectors * kLanes;
      const float* scales = w[v / kPanelVectors].scales + column;
      const float* mins = w[v / kPanelVectors].mins + column;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int64_t step = r * kChunkSteps + s;
        float* acc = c + r * c_stride + v * kLanes;
        store(add_step<kGroups, kMin>(load(acc), sum[r][v], x_scales[step], x_sums + step * kGroups, scales, mins),
              acc);
      }
    }
  }
}

// All rows of `kPanels` panels, in tiles as tall as registers allow, then in smaller ones.
template <typename Dot, int kGroups, bool kMin, int kPanels>
void quantized_rows(float* c, int64_t c_stride, const QuantizedRows& x, int64_t r0, int64_t rows,
                    const UnpackedChunk* w, int64_t s0, int64_t steps) {
  constexpr int kMaxRows = kQuantizedRows / kGroups;
  const auto tiles = [&](auto size) {
    constexpr int kRows = decltype(size)::value;
    if constexpr (kRows <= kMaxRows)
      for (; rows >= kRows; rows -= kRows, r0 += kRows, c += kRows * c_stride)
        quantized_tile<Dot, kGroups, kMin, kRows, kPanels>(c, c_stride, x, r0, w, s0, steps);
  };
  tiles(std::integral_constant<int, kMaxRows>());
  if constexpr (kMaxRows != 8) tiles(std::integral_constant<int, 8>());
  if constexpr (kMaxRows != 4) tiles(std::integral_constant<int, 4>());
  if constexpr (kMaxRows != 2) tiles(std::integral_constant<int, 2>());
  if constexpr (kMaxRows != 1) tiles(std::integral_constant<int, 1>());
}

// All panels of a group, in tiles of kQuantizedPanels, then of one.
template <typename Dot, int kGroups, bool kMin>
void quantized_panels(float* c, const QuantizedRows& x, int64_t r0, int64_t rows, const UnpackedChunk* w,
                      int64_t panels, int64_t s0, int64_t steps) {
  const int64_t c_stride = panels * kPanelWidth;
  int64_t p = 0;
  for (; p + kQuantizedPanels <= panels; p += kQuantizedPanels)
    quantized_rows<Dot, kGroups, kMin, kQuantizedPanels>(c + p * kPanelWidth, c_stride, x, r0, rows, w + p, s0, steps);
  if constexpr (kQuantizedPanels > 1)
    for (; p < panels; ++p)
      quantized_rows<Dot, kGroups, kMin, 1>(c + p * kPanelWidth, c_stride, x, r0, rows, w + p, s0, steps);
}

// Where a panel's part of the scratch holds its codes, scales and mins, unpacked.
inline constexpr int64_t kScratchFloats = kChunkScratchBytes / static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kScalesAt = kChunkSteps * kStepBytes / static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kMinsAt = kScalesAt + kChunkSteps * kMaxStepGroups * kPanelWidth;

// Unpacks the scales of steps [s0, s0 + steps) of panel p into its part of the scratch.
void unpack_scales(float* scratch, const QuantizedWeight& w, int64_t k_size, int64_t p, int64_t s0, int64_t steps) {
  const QuantizedLayout& layout = *w.layout;
  const int64_t step_bytes = layout.scale_bytes() * layout.groups();
  const int64_t super_columns = layout.super_columns() * kPanelWidth;
  const uint8_t* scales = w.scales + p * (k_size / kStep) * step_bytes;
  const f16_t* supers = w.super_scales;
  if (layout.has_super_scales) {
    supers += p * (k_size / layout.block_size) * super_columns;
    hwy::Prefetch(supers + (s0 * kStep / layout.block_size + 1) * super_columns);
  }
  for (int64_t i = 0; i < kChunkSteps * step_bytes; i += 64)
    hwy::Prefetch(scales + (s0 + kChunkSteps) * step_bytes + i);
  expand_scales(scratch + kScalesAt, scratch + kMinsAt, layout, scales, supers, s0, steps);
}

// ---- One row: codes are unpacked in registers as they are read, since nobody else wants them.

// c [kPanels * 16] += the row of x times panels whose quants begin at `quants`, panel_bytes apart, at step s0.
template <typename Dot, typename Fields, int kGroups, bool kMin, int kPanels>
HWY_NOINLINE void quantized_row(float* HWY_RESTRICT c, const QuantizedRows& x, const float* scratch,
                                const uint8_t* quants, int64_t panel_bytes, int64_t s0, int64_t steps,
                                const uint8_t* table) {
  constexpr int kDots = static_cast<int>(kStepVectors) / kGroups;
  const int64_t first = x.step(0, s0);
  for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
    Vec acc[kPanels];
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) acc[p] = load(c + p * kPanelWidth + n);
    const int8_t* x_codes = x.codes + first * kStep;
    const float* x_scale = x.scales + first;
    const int32_t* x_start = x.starts + first * kGroups;
    const float* x_sum = x.sums + first * kGroups;
    const float* scales = scratch + kScalesAt + n;
    const uint8_t* step_quants = quants;
    for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* panel_quants = step_quants + p * panel_bytes;
        if (n == 0)
#pragma GCC unroll 16
          for (int64_t i = 0; i < Fields::kBytes; i += 64) hwy::Prefetch(panel_quants + kPrefetchQuants + i);
        const Fields fields(panel_quants, n);
        Ints sums[kGroups];
#pragma GCC unroll 16
        for (int g = 0; g < kGroups; ++g) sums[g] = hn::Set(IntLanes(), x_start[g]);
#pragma GCC unroll 16
        for (int i = 0; i < kStepVectors; ++i)
          sums[i / kDots] = Dot::dot(sums[i / kDots], fields.codes(i, table), broadcast_bytes(x_codes + i * 4));
        const float* scale = scales + p * kScratchFloats;
        acc[p] = add_step<kGroups, kMin>(acc[p], sums, *x_scale, x_sum, scale, scale + kMinsAt - kScalesAt);
      }
      x_codes += kStep;
      x_scale += 1;
      x_start += kGroups;
      x_sum += kGroups;
      scales += kGroups * kPanelWidth;
      step_quants += Fields::kBytes;
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) store(acc[p], c + p * kPanelWidth + n);
  }
}

// All panels of a group.
template <typename Dot, typename Format>
void quantized_row_panels(float* c, const QuantizedRows& x, const float* scratch, const uint8_t* quants,
                          int64_t panel_bytes, int64_t panels, int64_t s0, int64_t steps, const uint8_t* table) {
  const auto panels_at = [&](int64_t p, auto count) {
    quantized_row<Dot, typename Format::Fields, Format::kGroups, Format::kMin, decltype(count)::value>(
        c + p * kPanelWidth, x, scratch + p * kScratchFloats, quants + p * panel_bytes, panel_bytes, s0, steps, table);
  };
  int64_t p = 0;
  for (; p + kQuantizedRowPanels <= panels; p += kQuantizedRowPanels)
    panels_at(p, std::integral_constant<int, kQuantizedRowPanels>());
  if constexpr (kQuantizedRowPanels > 1)
    for (; p < panels; ++p) panels_at(p, std::integral_constant<int, 1>());
}

// ---- The product.

template <typename Dot, typename Format>
void product_of_format(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                       int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  using Fields = typename Format::Fields;
  const uint8_t* table = w.layout->table.data();
  const int64_t panel_bytes = k_size / kStep * Fields::kBytes;
  for (int64_t s0 = 0; s0 < k_size / kStep; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, k_size / kStep - s0);
    const uint8_t* quants = w.quants + p0 * panel_bytes + s0 * Fields::kBytes;
    for (int64_t p = 0; p < panels; ++p) unpack_scales(scratch + p * kScratchFloats, w, k_size, p0 + p, s0, steps);
    if (x.rows == 1) {
      quantized_row_panels<Dot, Format>(c, x, scratch, quants, panel_bytes, panels, s0, steps, table);
      continue;
    }
    UnpackedChunk unpacked[kMaxGroupPanels];
    for (int64_t p = 0; p < panels; ++p) {
      float* panel_scratch = scratch + p * kScratchFloats;
      const uint8_t* codes = quants + p * panel_bytes;
      if constexpr (Fields::kBytes < kStepBytes) {
        auto* bytes = reinterpret_cast<uint8_t*>(panel_scratch);
        unpack_steps<Fields>(bytes, codes, steps, table);
        codes = bytes;
      }
      unpacked[p] = {codes, panel_scratch + kScalesAt, panel_scratch + kMinsAt};
    }
    quantized_panels<Dot, Format::kGroups, Format::kMin>(c, x, r0, rows, unpacked, panels, s0, steps);
  }
}

template <template <bool> typename Dot>
void product_with(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0, int64_t rows,
                  int64_t p0, int64_t panels, float* scratch) {
  std::memset(c, 0, static_cast<size_t>(rows * panels * kPanelWidth) * sizeof(float));
  with_format(*w.layout, [&](auto format) {
    using Format = decltype(format);
    product_of_format<Dot<Format::kBytes>, Format>(c, x, w, k_size, r0, rows, p0, panels, scratch);
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
  q.groups = layout.groups();
  q.offset = layout.offset;
  q.codes = static_cast<int8_t*>(base);
  q.scales = reinterpret_cast<float*>(q.codes + steps * kStep);
  q.starts = reinterpret_cast<int32_t*>(q.scales + steps);
  q.sums = reinterpret_cast<float*>(q.starts + steps * q.groups);
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
