// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/quantized/quantized_decode.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/quantized/quantized_decode.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_steps-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Scales, mins and zeros of kLanes outputs, for each group of a step: value = scale * (code - zero) - min.
struct StepDecoder {
  HWY_INLINE StepDecoder() {}  // compilers give an implicit one the baseline's target
  Vec scale[2], min[2];
  Ints zero;
};

HWY_INLINE Vec load_group_scale(const QuantizedWeight& w, int64_t at) {
  switch (w.layout->group_scales) {
    case DType::f16: return load(reinterpret_cast<const f16_t*>(w.scales) + at);
    case DType::bf16: return load(reinterpret_cast<const bf16_t*>(w.scales) + at);
    default: return load(reinterpret_cast<const float*>(w.scales) + at);
  }
}

HWY_INLINE Vec first_factor(Ints pair, Vec super) {
  return hn::Mul(super, hn::ConvertTo(Lanes(), hn::ShiftRight<16>(hn::ShiftLeft<16>(pair))));
}
HWY_INLINE Vec second_factor(Ints pair, Vec super) {
  return hn::Mul(super, hn::ConvertTo(Lanes(), hn::ShiftRight<16>(pair)));
}

// The decoder of step s of panel p, for outputs from `n` on.
template <typename Format>
HWY_INLINE StepDecoder decoder_of(const QuantizedWeight& w, int64_t all_steps, int64_t p, int64_t s, int64_t n) {
  const QuantizedLayout& layout = *w.layout;
  StepDecoder d;
  d.zero = hn::Set(IntLanes(), layout.zero);
  if constexpr (Format::kExpanded) {
    const int64_t shared = layout.group_steps == 0 ? all_steps : layout.group_steps;
    const int64_t at = (p * (all_steps / shared) + s / shared) * kPanelWidth + n;
    d.scale[0] = load_group_scale(w, at);
    if constexpr (Format::kMin) d.zero = load_bytes(w.zeros + at);
  } else {
    const int64_t columns = layout.super_columns() * kPanelWidth, supers = all_steps / kChunkSteps * columns;
    const f16_t* super = Format::kSupers ? w.super_scales + p * supers + s / kChunkSteps * columns : nullptr;
    const Supers both = load_supers<Format>(super, n, layout.scale_unit);
    const StepScales<Format> step(w.scales + (p * all_steps + s) * Format::kScaleBytes, n, both);
    if constexpr (Format::kFolded) {
      d.scale[0] = first_factor(step.pair, both.scale), d.scale[1] = second_factor(step.pair, both.scale);
      if constexpr (Format::kMin)
        d.min[0] = first_factor(step.min_pair, both.min), d.min[1] = second_factor(step.min_pair, both.min);
    } else {
      for (int g = 0; g < Format::kGroups; ++g) d.scale[g] = step.scale[g];
      if constexpr (Format::kMin) d.min[0] = step.min;
    }
  }
  return d;
}

template <typename Format>
void decode_steps(float* to, const QuantizedWeight& w, int64_t all_steps, int64_t p, int64_t s0, int64_t steps) {
  using Fields = typename Format::Fields;
  constexpr bool kHasMin = Format::kMin && !Format::kExpanded;
  const uint8_t* quants = w.quants + (p * all_steps + s0) * Fields::kBytes;
  for (int64_t s = 0; s < steps; ++s, quants += Fields::kBytes, to += kStep * kPanelWidth)
    for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
      const StepDecoder d = decoder_of<Format>(w, all_steps, p, s0 + s, n);
      const Fields fields(quants, n);
#pragma GCC unroll kUnroll
      for (int i = 0; i < kStepVectors; ++i) {
        const int g = i * Format::kGroups / static_cast<int>(kStepVectors);
        Words codes = fields.codes(i, w.layout->table.data());
#pragma GCC unroll kUnroll
        for (int j = 0; j < 4; ++j, codes = hn::ShiftRight<8>(codes)) {
          const Ints code = hn::BitCast(IntLanes(), hn::And(codes, hn::Set(WordLanes(), 0xffu)));
          Vec value = hn::Mul(d.scale[g], hn::ConvertTo(Lanes(), hn::Sub(code, d.zero)));
          if constexpr (kHasMin) value = hn::Sub(value, d.min[g]);
          store(value, to + (i * 4 + j) * kPanelWidth + n);
        }
      }
    }
}

DecodeSteps decoder(const QuantizedFormat& format) {
  DecodeSteps result = nullptr;
  with_format(format, [&](auto constant) { result = decode_steps<decltype(constant)>; });
  return result;
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(decoder);

DecodeSteps decode_steps_of(const QuantizedFormat& format, Isa isa) { return EADEM_CPU_DISPATCH(decoder, isa)(format); }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
