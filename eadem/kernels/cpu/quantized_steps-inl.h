// SPDX-License-Identifier: Apache-2.0
//
// A step of QuantizedPanels unpacked, by the format of the weight: codes to one byte each, scales to f32.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_
#undef EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_
#else
#define EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_
#endif

#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/quantized_panels.h"
#include "eadem/kernels/cpu/quantized_words-inl.h"
#include "eadem/kernels/cpu/stream_ahead.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

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
#pragma GCC unroll kUnroll
    for (int i = 0; i < kLow; ++i) low[i] = load_words(quants + i * 64 + lane * 4);
#pragma GCC unroll kUnroll
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
  HWY_INLINE Supers() {}  // compilers give an implicit one the baseline's target
  HWY_INLINE Supers(Vec scale, Vec min) : scale(scale), min(min) {}
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

inline constexpr int64_t kFetchScaleSteps = 8;

template <typename Format>
HWY_INLINE void fetch_step(const uint8_t* quants, const uint8_t* scales) {
#pragma GCC unroll kUnroll
  for (int64_t i = 0; i < Format::Fields::kBytes; i += 64) fetch_near(quants + kFetchNear + i);
  fetch_near(scales + kFetchScaleSteps * Format::kScaleBytes);
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
  const int64_t group_steps = layout.group_steps;
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
    fetch_step<Format>(quants, scale_bytes);
#pragma GCC unroll kUnroll
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
#pragma GCC unroll kUnroll
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

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
