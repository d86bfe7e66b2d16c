// SPDX-License-Identifier: Apache-2.0
//
// Reads a step of QuantizedPanels into registers for each weight format: codes as one byte each, scales as f32. Also
// finds where the steps of a chunk are stored.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_
#undef EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_
#else
#define EADEM_KERNELS_CPU_QUANTIZED_STEPS_INL_H_
#endif

#include <iterator>
#include <utility>

#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_matmul.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_words-inl.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// Field `slot` of kBits bits of each byte, shifted left by kUp bits.
template <int kBits, int kUp = 0>
HWY_INLINE Words field(Words packed, int slot) {
  const Words mask = hn::Set(WordLanes(), 0x01010101u * (((1u << kBits) - 1) << kUp));
  switch (slot * kBits - kUp) {
    case -4: return hn::And(hn::ShiftLeft<4>(packed), mask);
    case -3: return hn::And(hn::ShiftLeft<3>(packed), mask);
    case -2: return hn::And(hn::ShiftLeft<2>(packed), mask);
    case -1: return hn::And(hn::ShiftLeft<1>(packed), mask);
    case 0: return hn::And(packed, mask);
    case 1: return hn::And(hn::ShiftRight<1>(packed), mask);
    case 2: return hn::And(hn::ShiftRight<2>(packed), mask);
    case 3: return hn::And(hn::ShiftRight<3>(packed), mask);
    case 4: return hn::And(hn::ShiftRight<4>(packed), mask);
    case 5: return hn::And(hn::ShiftRight<5>(packed), mask);
    case 6: return hn::And(hn::ShiftRight<6>(packed), mask);
    default: return hn::And(hn::ShiftRight<7>(packed), mask);
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

// How a step's codes are stored: kLow bits of each in kLow vectors, then kHigh more bits in kHigh vectors. With kTable,
// codes are indices into a table.
template <int kLow, int kHigh, bool kTable>
struct CodeFields {
  static constexpr int64_t kBytes = 64 * (kLow + kHigh);
  static constexpr int kLowWords = kLow, kHighWords = kHigh;

  HWY_INLINE CodeFields() {}  // compilers give an implicit one the baseline's target
  // Loads the codes of kLanes outputs, from output `lane` on, in the step at `quants`.
  HWY_INLINE CodeFields(const uint8_t* quants, int64_t lane) {
#pragma GCC unroll kUnroll
    for (int i = 0; i < kLow; ++i) low[i] = load_words_once(quants + i * 64 + lane * 4);
#pragma GCC unroll kUnroll
    for (int i = 0; i < kHigh; ++i) high[i] = load_words_once(quants + (kLow + i) * 64 + lane * 4);
  }

  // Returns vector i of the step, one byte a code.
  HWY_INLINE Words codes(int i, const uint8_t* table) const {
    if constexpr (kLow == 8) return low[i];
    Words word = field<kLow>(low[i % kLow], i / kLow);
    if constexpr (kHigh > 0) word = hn::Or(word, field<kHigh, kLow>(high[i % kHigh], i / kHigh));
    if constexpr (kTable) word = look_up(table, word);
    return word;
  }

  // Loads only vector i of a step at `quants` that has neither high bits nor a table.
  static HWY_INLINE Words codes_at(const uint8_t* quants, int64_t lane, int i) {
    static_assert(kHigh == 0 && !kTable);
    const Words word = load_words(quants + i % kLow * 64 + lane * 4);
    if constexpr (kLow == 8) return word;
    return field<kLow>(word, i / kLow);
  }

  Words low[kLow];
  Words high[kHigh == 0 ? 1 : kHigh];
};

// The properties that a tile is compiled for: how many sums a step has, whether there are mins, and whether sub-scales
// are folded into the codes.
template <int kDotsValue, bool kMinValue, bool kFoldedValue>
struct TileFormat {
  static constexpr int kDots = kDotsValue;
  static constexpr bool kMin = kMinValue, kFolded = kFoldedValue;
};

// The properties that the code reading a step is compiled for.
template <QuantizedFormat kFormat>
struct StepFormat {
  using Scales = QuantizedFormat::Scales;
  using Fields =
      CodeFields<low_bits(kFormat.code_bits), kFormat.code_bits - low_bits(kFormat.code_bits), kFormat.has_table>;
  static constexpr Scales kScales = kFormat.scales;
  static constexpr int kGroups = kFormat.groups;
  static constexpr bool kMin = kFormat.has_min;
  static constexpr bool kSupers = kScales == Scales::bytes || kScales == Scales::nibbles;
  static constexpr bool kUnit = kFormat.has_table;  // super-scales have a unit other than 1
  static constexpr bool kFolded = kFormat.folded();
  static constexpr int kDots = kFolded ? 1 : kGroups;  // sums of a step in a tile
  // The bits of codes as a single row and as a tile multiply them. In a tile, folded codes are multiplied by sub-scales
  // of at most 15 (with mins: 3 * 15) or have bytes of their own.
  static constexpr int kRowBits = kFormat.has_table ? kFormat.table_bits : kFormat.code_bits;
  static constexpr int kTileBits = !kFolded ? kRowBits : kMin ? 6 : 8;
  static constexpr bool kExpanded = kScales == Scales::groups;  // f32 scales and mins are in the scratch
  static constexpr int64_t kScaleBytes = kExpanded ? kPanelWidth * static_cast<int64_t>(sizeof(float))
                                                   : kPanelWidth * (kScales == Scales::f16 ? 2 : 1) * kGroups *
                                                         (kMin && kScales != Scales::nibbles ? 2 : 1);
  using Tile = TileFormat<kDots, kMin, kFolded && kMin>;
};

template <typename Function, size_t... kIndices>
void with_format(const QuantizedFormat& format, Function f, std::index_sequence<kIndices...>) {
  static_cast<void>(
      ((format == kQuantizedFormats[kIndices] && (f(StepFormat<kQuantizedFormats[kIndices]>()), true)) || ...));
}

// Calls f with the StepFormat of `format`. It chooses a routine for a plan.
template <typename Function>
void with_format(const QuantizedFormat& format, Function f) {
  count_lookup();
  with_format(format, f, std::make_index_sequence<std::size(kQuantizedFormats)>());
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

// The powers of two 2^(e - 128) of bytes e. Those of e < 2 are subnormal: their bits are (e + 1) << 21, which exceeds
// (e - 1) << 23, the bits of the others, only there.
HWY_INLINE Vec load_powers(const uint8_t* p) {
  const Ints e = load_bytes(p);
  const Ints normal = hn::Sub(hn::ShiftLeft<23>(e), hn::Set(IntLanes(), 1 << 23));
  return hn::BitCast(Lanes(), hn::Max(normal, hn::Add(hn::ShiftLeft<21>(e), hn::Set(IntLanes(), 1 << 21))));
}

// In the scratch, the mins of a step stand this many floats after its scales.
inline constexpr int64_t kMinsBehind = kChunkSteps * kMaxStepGroups * kPanelWidth;

// The super-scales, times their unit, and super-mins of kLanes outputs.
struct Supers {
  HWY_INLINE Supers() {}  // compilers give an implicit one the baseline's target
  HWY_INLINE Supers(Vec scale, Vec min) : scale(scale), min(min) {}
  Vec scale, min;
};
template <typename Format>
HWY_INLINE Supers load_supers(const f16_t* supers, int64_t lane, float unit) {
  if constexpr (!Format::kSupers) return {zero(), zero()};
  Vec scale = load(supers + lane);
  if constexpr (Format::kUnit) scale = hn::Mul(scale, set(unit));
  return {scale, Format::kMin ? load(supers + kPanelWidth + lane) : zero()};
}

// The scales of kLanes outputs in one step, decoded from the step's bytes.
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
    } else if constexpr (Format::kScales == Scales::exponents) {
      scale[0] = load_powers(bytes + lane);
    } else {
      const auto* stored = reinterpret_cast<const f16_t*>(bytes) + lane;
      scale[0] = load(stored);
      if constexpr (Format::kMin) min = load(stored + kPanelWidth);
    }
  }

  Vec scale[Format::kDots];
  Vec min;
  Ints pair, min_pair;  // folded: sub-scales and sub-mins of both groups
};

// Adds one step to a chain. `scales` are StepScales::scale.
template <typename Format>
HWY_INLINE Vec add_step(Vec acc, const Ints* sums, float x_scale, const Vec* scales) {
  Vec f = hn::Mul(hn::ConvertTo(Lanes(), sums[0]), scales[0]);
  if constexpr (Format::kDots == 2) f = hn::MulAdd(hn::ConvertTo(Lanes(), sums[1]), scales[1], f);
  return hn::MulAdd(set(x_scale), f, acc);
}
// Adds one step of a format with mins to a chain; `x_sum` multiplies the min.
template <typename Format>
HWY_INLINE Vec add_step(Vec acc, const Ints* sums, float x_scale, const Vec* scales, Vec x_sum, Vec min) {
  const Vec f = hn::Mul(hn::ConvertTo(Lanes(), sums[0]), scales[0]);
  return hn::MulAdd(set(x_scale), hn::NegMulAdd(x_sum, min, f), acc);
}

// Scales are prefetched this many steps ahead.
inline constexpr int64_t kFetchScaleSteps = 8;

// The places of the unpacked codes, scales and mins in a panel's part of the scratch.
inline constexpr int64_t kScratchFloats = kChunkScratchBytes / static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kScalesAt = kChunkSteps * kStepBytes / static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kMinsAt = kScalesAt + kMinsBehind;
inline constexpr int64_t kMinPairsAt = kMinsAt + kChunkSteps * kPanelWidth;

// Writes the scales of steps [s0, s0 + steps) of a panel whose scales belong to groups. With zero points it also writes
// the mins, scale * (zero - middle). Both go to the places in the scratch where unpack_chunk expects them.
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

// A chunk of some neighbouring panels: the addresses of the first panel's planes, and the distances between panels.
struct PackedChunk {
  const uint8_t *quants, *scales;
  const f16_t* supers;
  float supers_unit;
  int64_t quants_stride, scales_stride, supers_stride;

  PackedChunk from_panel(int64_t p) const {
    PackedChunk chunk = *this;
    chunk.quants += p * quants_stride, chunk.scales += p * scales_stride, chunk.supers += p * supers_stride;
    return chunk;
  }
};

// Returns the chunk of steps [s0, s0 + steps) of panels [p0, p0 + panels). Scales of groups are expanded into
// `scratch`.
template <typename Format>
HWY_INLINE PackedChunk packed_chunk(const QuantizedWeight& w, int64_t all_steps, int64_t p0, int64_t panels, int64_t s0,
                                    int64_t steps, float* scratch) {
  PackedChunk chunk{};
  chunk.quants_stride = all_steps * Format::Fields::kBytes;
  chunk.quants = w.quants + p0 * chunk.quants_stride + s0 * Format::Fields::kBytes;
  if constexpr (Format::kExpanded) {
    for (int64_t p = 0; p < panels; ++p)
      expand_groups<Format>(scratch + p * kScratchFloats, w, all_steps, p0 + p, s0, steps);
    chunk.scales_stride = kChunkScratchBytes;
    chunk.scales = reinterpret_cast<const uint8_t*>(scratch + kScalesAt);
  } else {
    chunk.scales_stride = all_steps * Format::kScaleBytes;
    chunk.scales = w.scales + p0 * chunk.scales_stride + s0 * Format::kScaleBytes;
  }
  if constexpr (Format::kSupers) {
    const int64_t columns = w.layout->super_columns() * kPanelWidth;
    chunk.supers_unit = w.layout->scale_unit;
    chunk.supers_stride = all_steps / kChunkSteps * columns;
    chunk.supers = w.super_scales + p0 * chunk.supers_stride + s0 / kChunkSteps * columns;
  }
  return chunk;
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
