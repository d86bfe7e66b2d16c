// SPDX-License-Identifier: Apache-2.0
//
// The product for one row: codes and scales are unpacked in registers as they are read, since no other row needs them.
#include <algorithm>
#include <array>
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

// Panels that the row multiplies side by side, and vectors of a panel that it takes at once. With vectors shorter than
// a cache line and 16 registers, one panel is read from its beginning to its end, each line once. Four panels at half a
// line spilled, and read memory only during the first halves.
inline constexpr bool kSingleStream = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4;
inline constexpr int kQuantizedRowPanels = kSingleStream || HWY_TARGET == HWY_SCALAR ? 1 : 4;
inline constexpr int kRowVectors = kSingleStream ? kPanelVectors : 1;

// The vectors of a step in an order in which each stored word is read once: vectors that share bytes are neighbours.
template <int kLow, int kHigh>
constexpr std::array<int, kStepVectors> shared_bytes_order() {
  std::array<int, kStepVectors> order{};
  size_t count = 0;
  constexpr int kHighWords = kHigh == 0 ? 1 : kHigh;
  for (int high = 0; high < kHighWords; ++high)
    for (int low = high; low < kLow; low += kHighWords)
      for (int i = low; i < kStepVectors; i += kLow) order[count++] = i;
  return order;
}

// sums[g][v] = start(g) + the dot product of group g of a step of weights with the codes of a row, for the v-th kLanes
// outputs from output `lane` on.
template <typename Dot, typename Format, typename Start>
HWY_INLINE void make_row_dots(Ints (&sums)[Format::kGroups][kRowVectors], const uint8_t* quants, int64_t lane,
                              const int8_t* x_codes, const uint8_t* table, Start start) {
  using Fields = typename Format::Fields;
  constexpr int kGroups = Format::kGroups, kGroupVectors = static_cast<int>(kStepVectors) / kGroups;
  constexpr int kSums = Dot::kSums < kGroupVectors ? Dot::kSums : kGroupVectors;
  constexpr auto kOrder = shared_bytes_order<Fields::kLowWords, Fields::kHighWords>();
  Fields fields[kRowVectors];
#pragma GCC unroll kUnroll
  for (int v = 0; v < kRowVectors; ++v) fields[v] = Fields(quants, lane + v * kLanes);
  if constexpr (kSums == 1)
#pragma GCC unroll kUnroll
    for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll kUnroll
      for (int v = 0; v < kRowVectors; ++v) sums[g][v] = start(g);
  Ints partial[kGroups][kRowVectors];
  int products[kGroups] = {};
#pragma GCC unroll kUnroll
  for (size_t j = 0; j < kStepVectors; ++j) {
    const int i = kOrder[j], g = i / kGroupVectors, n = products[g]++;
    const Ints bytes = broadcast_bytes(x_codes + i * 4);
#pragma GCC unroll kUnroll
    for (int v = 0; v < kRowVectors; ++v) {
      const auto weights = Dot::weights(fields[v].codes(i, table));
      if constexpr (kSums == 1) {
        sums[g][v] = Dot::dot(sums[g][v], weights, bytes);
      } else {
        const Ints product = Dot::multiply(weights, bytes);
        partial[g][v] = n % kSums == 0 ? product : Dot::add(partial[g][v], product);
        if ((n + 1) % kSums == 0 || n + 1 == kGroupVectors)
          sums[g][v] = hn::Add(n < kSums ? start(g) : sums[g][v], Dot::total(partial[g][v]));
      }
    }
  }
}

// c [kPanels * 16] += row `row` of x times the chunk, which begins at step s0.
template <typename Dot, typename Format, int kPanels>
HWY_NOINLINE void quantized_row(float* HWY_RESTRICT c, const QuantizedRows& x, int64_t row, const PackedChunk& w,
                                int64_t s0, int64_t steps, const uint8_t* table) {
  using Fields = typename Format::Fields;
  constexpr int kGroups = Format::kGroups, kVecs = kPanels * kRowVectors;
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
  for (int64_t n0 = 0; n0 < kPanelWidth; n0 += kRowVectors * kLanes) {
    Vec acc[kVecs];
    Supers supers[kVecs];
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t p = v / kRowVectors, n = n0 + v % kRowVectors * kLanes;
      acc[v] = load(c + p * kPanelWidth + n);
      supers[v] = load_supers<Format>(w.supers + p * w.supers_stride, n, w.supers_unit);
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
        if (n0 == 0) {
#pragma GCC unroll kUnroll
          for (int64_t i = 0; i < Fields::kBytes; i += 64) {
            if constexpr (kSingleStream) {
              fetch_near(panel_quants + far + i);
            } else {
              fetch_near(panel_quants + near + i);
              fetch_far(panel_quants + far + i);
            }
          }
          if (new_scales) fetch_near(panel_scales + near_scales);
        }
        Ints sums[kGroups][kRowVectors];
        make_row_dots<Dot, Format>(sums, panel_quants, n0, x_codes, table, [&](int g) {
          return Format::kFolded ? hn::Zero(IntLanes()) : hn::Set(IntLanes(), x.starts[step * kGroups + g]);
        });
#pragma GCC unroll kUnroll
        for (int v = 0; v < kRowVectors; ++v) {
          Vec& sum = acc[p * kRowVectors + v];
          const StepScales<Format> scale(panel_scales, n0 + v * kLanes, supers[p * kRowVectors + v]);
          Ints dots[kGroups];
#pragma GCC unroll kUnroll
          for (int g = 0; g < kGroups; ++g) dots[g] = sums[g][v];
          if constexpr (Format::kFolded) {
            const Ints x_pairs = hn::Set(IntLanes(), x.pairs[step]);
            const Ints pair = pair_of(dots[0], dots[1]);
            if constexpr (Format::kMin) {
              dots[0] = dot_pairs(pair, scale.pair);
              const Vec x_sum = hn::ConvertTo(Lanes(), dot_pairs(x_pairs, scale.min_pair));
              sum = add_step<Format>(sum, dots, x.scales[step], scale.scale, x_sum, scale.min);
            } else {
              dots[0] = hn::Sub(dot_pairs(pair, scale.pair), dot_pairs(x_pairs, scale.pair));
              sum = add_step<Format>(sum, dots, x.scales[step], scale.scale);
            }
          } else if constexpr (Format::kMin) {
            sum = add_step<Format>(sum, dots, x.scales[step], scale.scale, set(x.sums[step]), scale.min);
          } else {
            sum = add_step<Format>(sum, dots, x.scales[step], scale.scale);
          }
        }
      }
    }
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) store(acc[v], c + v / kRowVectors * kPanelWidth + n0 + v % kRowVectors * kLanes);
  }
}

template <template <int> typename Dot, typename Format>
void row_product_of_format(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                           int64_t /*rows*/, int64_t p0, int64_t panels, float* scratch) {
  const int64_t all_steps = k_size / kStep;
  std::memset(c, 0, static_cast<size_t>(panels * kPanelWidth) * sizeof(float));
  cut_into<kQuantizedRowPanels, 1>(panels, [&](auto width, int64_t p) {
    for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
      const int64_t steps = std::min(kChunkSteps, all_steps - s0);
      const PackedChunk chunk = packed_chunk<Format>(w, all_steps, p0 + p, width, s0, steps, scratch);
      quantized_row<Dot<Format::kRowBits>, Format, decltype(width)::value>(c + p * kPanelWidth, x, r0, chunk, s0, steps,
                                                                           w.layout->table.data());
    }
  });
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
