// SPDX-License-Identifier: Apache-2.0
//
// The product for one row: codes and scales are unpacked in registers as they are read, since no other row needs them.
#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/linear/quantized/quantized_matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/quantized/quantized_row.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/quantized/integer_tiles-inl.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_steps-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Panels that the row multiplies side by side.
inline constexpr int kQuantizedRowPanels = HWY_TARGET == HWY_SCALAR ? 1 : 4;

// c [kPanels * 16] += row `row` of x times the chunk, which begins at step s0.
template <typename Dot, typename Format, int kPanels>
HWY_NOINLINE void quantized_row(float* HWY_RESTRICT c, const QuantizedRows& x, int64_t row, const PackedChunk& w,
                                int64_t s0, int64_t steps, const uint8_t* table) {
  using Fields = typename Format::Fields;
  constexpr int kGroups = Format::kGroups, kGroupVectors = static_cast<int>(kStepVectors) / kGroups;
  const int64_t first = x.step(row, s0);
  const StreamAhead ahead(w.quants_stride, (kPanels - 1) * w.quants_stride);
  const StreamAhead scales_ahead(w.scales_stride, (kPanels - 1) * w.scales_stride);
  if constexpr (Format::kSupers) {
    constexpr int64_t kBytes = kPanelWidth * (Format::kMin ? 2 : 1) * static_cast<int64_t>(sizeof(f16_t));
    const int64_t stride = w.supers_stride * static_cast<int64_t>(sizeof(f16_t));
    const auto* bytes = reinterpret_cast<const uint8_t*>(w.supers);
    const int64_t near = StreamAhead(stride, (kPanels - 1) * stride).offset(s0 / kChunkSteps * kBytes, 2 * kBytes);
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) fetch_near(bytes + p * stride + near);
  }
  for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
    Vec acc[kPanels];
    Supers supers[kPanels];
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) {
      acc[p] = load(c + p * kPanelWidth + n);
      supers[p] = load_supers<Format>(w.supers + p * w.supers_stride, n, w.supers_unit);
    }
    const uint8_t *quants = w.quants, *scales = w.scales;
    for (int64_t s = 0; s < steps; ++s, quants += Fields::kBytes, scales += Format::kScaleBytes) {
      const int64_t step = first + s;
      const int8_t* x_codes = x.codes + step * kStep;
      const int64_t at = (s0 + s) * Fields::kBytes, scales_at = (s0 + s) * Format::kScaleBytes;
      const int64_t near = ahead.offset(at, kFetchNear), far = ahead.offset(at, kFetchFar);
      const int64_t near_scales = scales_ahead.offset(scales_at, kFetchScaleSteps * Format::kScaleBytes);
      const bool new_scales = !Format::kExpanded && scales_at % 64 < Format::kScaleBytes;
#pragma GCC unroll kUnroll
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* panel_quants = quants + p * w.quants_stride;
        const uint8_t* panel_scales = scales + p * w.scales_stride;
        if (n == 0) {
#pragma GCC unroll kUnroll
          for (int64_t i = 0; i < Fields::kBytes; i += 64) {
            fetch_near(panel_quants + near + i);
            fetch_far(panel_quants + far + i);
          }
          if (new_scales) fetch_near(panel_scales + near_scales);
        }
        const Fields fields(panel_quants, n);
        Ints sums[kGroups], dots[1][1];
        const auto words_at = [&](int i, int /*v*/) { return fields.codes(i, table); };
        const auto start_of = [&](int g) {
          return [=, &x](int, int) {
            return Format::kFolded ? hn::Zero(IntLanes()) : hn::Set(IntLanes(), x.starts[step * kGroups + g]);
          };
        };
        make_dots<Dot, 0, kGroupVectors>(dots, x_codes, words_at, start_of(0));
        sums[0] = dots[0][0];
        if constexpr (kGroups == 2) {
          make_dots<Dot, kGroupVectors, 2 * kGroupVectors>(dots, x_codes, words_at, start_of(1));
          sums[1] = dots[0][0];
        }
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
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) store(acc[p], c + p * kPanelWidth + n);
  }
}

template <template <int> typename Dot, typename Format>
void row_product_of_format(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                           int64_t /*rows*/, int64_t p0, int64_t panels, float* scratch) {
  const int64_t all_steps = k_size / kStep;
  std::memset(c, 0, static_cast<size_t>(panels * kPanelWidth) * sizeof(float));
  for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, all_steps - s0);
    const PackedChunk chunk = packed_chunk<Format>(w, all_steps, p0, panels, s0, steps, scratch);
    cut_into<kQuantizedRowPanels, 1>(panels, [&](auto width, int64_t p) {
      quantized_row<Dot<Format::kRowBits>, Format, decltype(width)::value>(
          c + p * kPanelWidth, x, r0, chunk.from_panel(p), s0, steps, w.layout->table.data());
    });
  }
}

template <template <int> typename Dot>
QuantizedProduct row_product_with(const QuantizedFormat& format) {
  QuantizedProduct result = nullptr;
  with_format(format, [&](auto constant) { result = row_product_of_format<Dot, decltype(constant)>; });
  return result;
}

QuantizedProduct row_product(const QuantizedFormat& format) { return row_product_with<DotPairs>(format); }
// For processors of this target that have the 8-bit dot product.
QuantizedProduct row_product_byte_dots(const QuantizedFormat& format) { return row_product_with<DotBytes>(format); }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(row_product);
EADEM_CPU_EXPORT(row_product_byte_dots);

QuantizedProduct single_row_product(const QuantizedFormat& format, Isa isa) {
  return has_byte_dots(isa) ? EADEM_CPU_DISPATCH(row_product_byte_dots, isa)(format)
                            : EADEM_CPU_DISPATCH(row_product, isa)(format);
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
