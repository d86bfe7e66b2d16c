// SPDX-License-Identifier: Apache-2.0
//
// The product for few rows: codes and scales are unpacked in registers as they are read, and all rows use them there.
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

// Vectors of a panel that the row takes at once. With vectors shorter than a cache line and 16 registers, one panel is
// read from its beginning to its end, each line once. Four panels side by side at half a line spilled, and read memory
// only during the first halves.
inline constexpr bool kShortVectors = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4;
inline constexpr int kRowVectors = kShortVectors ? kPanelVectors : 1;
inline constexpr int kQuantizedRowPanels = kShortVectors || HWY_TARGET == HWY_SCALAR ? 1 : 4;

// How far loops are unrolled. Sanitizers check every access, and compile the unrolled loops for minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kRowUnroll = 1;
#else
inline constexpr int kRowUnroll = kUnroll;
#endif

// Up to so many rows, no step of weights is unpacked to memory: the chains and sums of some rows stay in registers
// beside it. Of 32 registers, 8 rows of one panel or 4 rows of two take 16, and 24 where a step has two sums. The other
// rows read the step again, from the first-level cache. With 16 registers there is room for one row.
inline constexpr int64_t kMostFewRows = HWY_TARGET == HWY_AVX3 ? 16 : 1;

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

// sums[g][r][v] = start(g, r) + the dot product of group g of a step of weights with the codes of row r, for the v-th
// kLanes outputs from output `lane` on. Neighbouring rows of x lie kChunkSteps steps apart.
template <typename Dot, typename Format, int kRows, typename Start>
HWY_INLINE void make_row_dots(Ints (&sums)[Format::kGroups][kRows][kRowVectors], const uint8_t* quants, int64_t lane,
                              const int8_t* x_codes, const uint8_t* table, Start start) {
  using Fields = typename Format::Fields;
  constexpr int kGroups = Format::kGroups, kGroupVectors = static_cast<int>(kStepVectors) / kGroups;
  constexpr int kSums = Dot::kSums < kGroupVectors ? Dot::kSums : kGroupVectors;
  constexpr auto kOrder = shared_bytes_order<Fields::kLowWords, Fields::kHighWords>();
  Fields fields[kRowVectors];
#pragma GCC unroll kRowUnroll
  for (int v = 0; v < kRowVectors; ++v) fields[v] = Fields(quants, lane + v * kLanes);
  if constexpr (kSums == 1)
#pragma GCC unroll kRowUnroll
    for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll kRowUnroll
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kRowUnroll
        for (int v = 0; v < kRowVectors; ++v) sums[g][r][v] = start(g, r);
  Ints partial[kGroups][kRows][kRowVectors];
  int products[kGroups] = {};
#pragma GCC unroll kRowUnroll
  for (size_t j = 0; j < kStepVectors; ++j) {
    const int i = kOrder[j], g = i / kGroupVectors, n = products[g]++;
    decltype(Dot::weights(Words())) weights[kRowVectors];
#pragma GCC unroll kRowUnroll
    for (int v = 0; v < kRowVectors; ++v) weights[v] = Dot::weights(fields[v].codes(i, table));
#pragma GCC unroll kRowUnroll
    for (int r = 0; r < kRows; ++r) {
      const Ints bytes = broadcast_bytes(x_codes + r * kChunkSteps * kStep + i * 4);
#pragma GCC unroll kRowUnroll
      for (int v = 0; v < kRowVectors; ++v) {
        if constexpr (kSums == 1) {
          sums[g][r][v] = Dot::dot(sums[g][r][v], weights[v], bytes);
        } else {
          const Ints product = Dot::multiply(weights[v], bytes);
          partial[g][r][v] = n % kSums == 0 ? product : Dot::add(partial[g][r][v], product);
          if ((n + 1) % kSums == 0 || n + 1 == kGroupVectors)
            sums[g][r][v] = hn::Add(n < kSums ? start(g, r) : sums[g][r][v], Dot::total(partial[g][r][v]));
        }
      }
    }
  }
}

// c [kRows, kPanels * 16] += rows row … of x times the chunk, which begins at step s0. kNearOnly: each line is
// prefetched once, into the first-level cache.
template <typename Dot, typename Format, int kRows, int kPanels, bool kNearOnly>
HWY_NOINLINE void quantized_few_rows(float* HWY_RESTRICT c, int64_t c_stride, const QuantizedRows& x, int64_t row,
                                     const PackedChunk& w, int64_t s0, int64_t steps, const uint8_t* table) {
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
#pragma GCC unroll kRowUnroll
    for (int p = 0; p < kPanels; ++p) fetch_near(bytes + p * stride + near);
  }
  for (int64_t n0 = 0; n0 < kPanelWidth; n0 += kRowVectors * kLanes) {
    Vec acc[kRows][kVecs];
    Supers supers[kVecs];
#pragma GCC unroll kRowUnroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t p = v / kRowVectors, n = n0 + v % kRowVectors * kLanes;
#pragma GCC unroll kRowUnroll
      for (int r = 0; r < kRows; ++r) acc[r][v] = load(c + r * c_stride + p * kPanelWidth + n);
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
#pragma GCC unroll kRowUnroll
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* panel_quants = quants + p * w.quants_stride;
        const uint8_t* panel_scales = scales + p * w.scales_stride;
        if (n0 == 0) {
#pragma GCC unroll kRowUnroll
          for (int64_t i = 0; i < Fields::kBytes; i += 64) {
            if constexpr (kNearOnly) {
              fetch_near(panel_quants + far + i);
            } else {
              fetch_near(panel_quants + near + i);
              fetch_far(panel_quants + far + i);
            }
          }
          if (new_scales) fetch_near(panel_scales + near_scales);
        }
        Ints sums[kGroups][kRows][kRowVectors];
        make_row_dots<Dot, Format>(sums, panel_quants, n0, x_codes, table, [&](int g, int r) {
          return Format::kFolded ? hn::Zero(IntLanes())
                                 : hn::Set(IntLanes(), x.starts[(step + r * kChunkSteps) * kGroups + g]);
        });
#pragma GCC unroll kRowUnroll
        for (int v = 0; v < kRowVectors; ++v) {
          const StepScales<Format> scale(panel_scales, n0 + v * kLanes, supers[p * kRowVectors + v]);
#pragma GCC unroll kRowUnroll
          for (int r = 0; r < kRows; ++r) {
            Vec& sum = acc[r][p * kRowVectors + v];
            const int64_t x_step = step + r * kChunkSteps;
            Ints dots[kGroups];
#pragma GCC unroll kRowUnroll
            for (int g = 0; g < kGroups; ++g) dots[g] = sums[g][r][v];
            if constexpr (Format::kFolded) {
              const Ints x_pairs = hn::Set(IntLanes(), x.pairs[x_step]);
              const Ints pair = pair_of(dots[0], dots[1]);
              if constexpr (Format::kMin) {
                dots[0] = dot_pairs(pair, scale.pair);
                const Vec x_sum = hn::ConvertTo(Lanes(), dot_pairs(x_pairs, scale.min_pair));
                sum = add_step<Format>(sum, dots, x.scales[x_step], scale.scale, x_sum, scale.min);
              } else {
                dots[0] = hn::Sub(dot_pairs(pair, scale.pair), dot_pairs(x_pairs, scale.pair));
                sum = add_step<Format>(sum, dots, x.scales[x_step], scale.scale);
              }
            } else if constexpr (Format::kMin) {
              sum = add_step<Format>(sum, dots, x.scales[x_step], scale.scale, set(x.sums[x_step]), scale.min);
            } else {
              sum = add_step<Format>(sum, dots, x.scales[x_step], scale.scale);
            }
          }
        }
      }
    }
#pragma GCC unroll kRowUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kRowUnroll
      for (int v = 0; v < kVecs; ++v)
        store(acc[r][v], c + r * c_stride + v / kRowVectors * kPanelWidth + n0 + v % kRowVectors * kLanes);
  }
}

// All rows, in pieces of at most kRows, meet a chunk of kPanels panels side by side, or of one.
template <typename Dot, typename Format, int kRows, int kPanels, bool kNearOnly = false>
void few_rows_of_panels(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                        int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  const int64_t all_steps = k_size / kStep, c_stride = panels * kPanelWidth;
  cut_into<kPanels, 1>(panels, [&](auto width, int64_t p) {
    for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
      const int64_t steps = std::min(kChunkSteps, all_steps - s0);
      const PackedChunk chunk = packed_chunk<Format>(w, all_steps, p0 + p, width, s0, steps, scratch);
      cut_into<kRows, 4, 2, 1>(rows, [&](auto height, int64_t r) {
        quantized_few_rows<Dot, Format, decltype(height)::value, decltype(width)::value, kNearOnly>(
            c + r * c_stride + p * kPanelWidth, c_stride, x, r0 + r, chunk, s0, steps, w.layout->table.data());
      });
    }
  });
}

template <template <int> typename Dot, typename Format, bool kOneStream>
void row_product_of_format(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                           int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  using RowDot = Dot<Format::kRowBits>;
  std::memset(c, 0, static_cast<size_t>(rows * panels * kPanelWidth) * sizeof(float));
  if constexpr (kMostFewRows > 1) {
    if (rows > 4) return few_rows_of_panels<RowDot, Format, 8, 1>(c, x, w, k_size, r0, rows, p0, panels, scratch);
    if (rows > 1) return few_rows_of_panels<RowDot, Format, 4, 2>(c, x, w, k_size, r0, rows, p0, panels, scratch);
  }
  // Formats with a unit look their codes up. That takes as long as reading them, and four panels hide its latency.
  constexpr bool kOne = kOneStream && !Format::kUnit;
  few_rows_of_panels<RowDot, Format, 1, kOne ? 1 : kQuantizedRowPanels, kOne || kShortVectors>(
      c, x, w, k_size, r0, rows, p0, panels, scratch);
}

template <template <int> typename Dot, bool kOneStream = false>
QuantizedProduct row_product_with(const QuantizedFormat& format) {
  QuantizedProduct result = nullptr;
  with_format(format, [&](auto constant) { result = row_product_of_format<Dot, decltype(constant), kOneStream>; });
  return result;
}

QuantizedProduct row_product(const QuantizedFormat& format) { return row_product_with<DotPairs>(format); }
// For processors of this target that have the 8-bit dot product.
QuantizedProduct row_product_byte_dots(const QuantizedFormat& format) { return row_product_with<DotBytes>(format); }
// For those of them whose cores read memory best as one stream. Measured on Zen 4, two cores: four streams reach 78% of
// the read bandwidth with q6_k and 85% or more with q4_k, and 60% without the prefetch into the second-level cache; one
// stream whose lines are prefetched once, 4096 bytes ahead, reaches 92% or more. q8_0: 72% and 87%. MXFP4, which is
// bound by its arithmetic (54 GB/s from the second-level cache; four panels side by side 59): 98% and 96%.
QuantizedProduct row_product_one_stream(const QuantizedFormat& format) {
  return row_product_with<DotBytes, HWY_TARGET == HWY_AVX3>(format);
}

int64_t most_rows() { return kMostFewRows; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(row_product);
EADEM_CPU_EXPORT(row_product_byte_dots);
EADEM_CPU_EXPORT(row_product_one_stream);
EADEM_CPU_EXPORT(most_rows);

int64_t most_few_rows(Isa isa) { return EADEM_CPU_DISPATCH(most_rows, isa)(); }

QuantizedProduct few_rows_product(const QuantizedFormat& format, Isa isa) {
  // Processors with products of bf16 and without tiles: Zen 4 and 5.
  if (isa == Isa::avx512_bf16) return EADEM_CPU_DISPATCH(row_product_one_stream, isa)(format);
  return has_byte_dots(isa) ? EADEM_CPU_DISPATCH(row_product_byte_dots, isa)(format)
                            : EADEM_CPU_DISPATCH(row_product, isa)(format);
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
