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

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/quantized_steps-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// ---- Quantizing rows of x.

// The scale of codes for steps * 32 values at x, and what values are multiplied with to give codes. A value that is
// not finite makes the scale so.
struct CodeScale {
  float scale, inverse;
};
HWY_INLINE CodeScale code_scale(const float* x, int64_t steps) {
  const IntLanes di;
  // Largest magnitude, compared as integers: NaN is larger than infinity is larger than any number.
  Ints most = hn::Zero(di);
  for (int64_t v = 0; v < steps * kStep; v += kLanes)
    most = hn::Max(most, hn::And(hn::BitCast(di, load(x + v)), hn::Set(di, 0x7fffffff)));
  const int32_t bits = hn::GetLane(hn::MaxOfLanes(di, most));
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  // Below this the reciprocal is not finite; so small a group counts as zero.
  const float inverse = largest > 0x1p-119f && bits < 0x7f800000 ? 127.0f / largest : 0.0f;
  return {inverse == 0.0f && bits < 0x7f800000 ? 0.0f : largest * (1.0f / 127.0f), inverse};
}

// Codes and group sums of the 32 values at x.
template <int kGroups>
HWY_INLINE void quantize_step(int8_t* codes, int32_t* sums, const float* x, float inverse) {
  int32_t rounded[kStep];
  for (int64_t v = 0; v < kStep; v += kLanes) {
    const Vec scaled = inverse == 0.0f ? zero() : hn::Mul(load(x + v), set(inverse));
    hn::StoreU(hn::NearestInt(scaled), IntLanes(), rounded + v);
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

// A row of x for weights with one scale for each output: a chunk at a time.
void quantize_row_chunks(const QuantizedRows& q, int64_t r, const float* x, int64_t k_size) {
  float total = 0;
  for (int64_t s0 = 0; s0 < k_size / kStep; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, k_size / kStep - s0), at = q.step(r, s0);
    const float* values = x + s0 * kStep;
    float ordered[kChunkSteps * kStep];
    if (q.order != nullptr) {
      for (int64_t i = 0; i < steps * kStep; ++i) ordered[i] = x[q.order[s0 * kStep + i]];
      values = ordered;
    }
    const CodeScale scale = code_scale(values, steps);
    int32_t sum = 0;
    for (int64_t s = 0; s < steps; ++s) {
      int32_t step_sum;
      quantize_step<1>(q.codes + (at + s) * kStep, &step_sum, values + s * kStep, scale.inverse);
      sum += step_sum;
    }
    q.scales[at] = scale.scale;
    q.starts[at] = -q.zero() * sum;
    total = hn::GetLane(hn::MulAdd(set(scale.scale), set(static_cast<float>(sum)), set(total)));
  }
  q.sums[r] = total;
}

// Rows [begin, end) of x [rows, k_size].
void quantize_row_range(const QuantizedRows& q, const float* x, int64_t x_stride, int64_t k_size, int64_t begin,
                        int64_t end) {
  const bool halves = q.layout->groups() == 2;
  if (q.layout->whole_rows()) {
    for (int64_t r = begin; r < end; ++r) quantize_row_chunks(q, r, x + r * x_stride, k_size);
    return;
  }
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
      const CodeScale scale = code_scale(values, 1);
      q.scales[step] = scale.scale;
      if (!halves) {
        quantize_step<1>(q.codes + step * kStep, sums, values, scale.inverse);
        q.starts[step] = -q.zero() * sums[0];
        q.sums[step] = static_cast<float>(sums[0]);
        continue;
      }
      quantize_step<2>(q.codes + step * kStep, sums, values, scale.inverse);
      if (!q.layout->folded) {
        for (int g = 0; g < 2; ++g) q.starts[step * 2 + g] = -q.zero() * sums[g];
        continue;
      }
      q.starts[step] = -q.zero() * (sums[0] + sums[1]);
      const int32_t factor = q.layout->has_min ? 1 : q.layout->zero;
      q.pairs[step] = (factor * sums[0] & 0xffff) | factor * sums[1] * 0x10000;
    }
}

// ---- The tile.

// A chunk of one panel, unpacked.
struct UnpackedChunk {
  const uint8_t* codes;  // [steps, 8, 16, 4]
  const float* scratch;  // its scales and mins
  const uint8_t* later;  // where the codes of a later chunk lie, packed
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

// c [kRows, kPanels * 16] += rows r0 … of x times the chunks w, which begin at step s0. With `fetch`, what later chunks
// will unpack is fetched meanwhile: memory would be idle.
template <typename Dot, typename Format, int kRows, int kPanels>
HWY_NOINLINE void quantized_tile(float* HWY_RESTRICT c, int64_t c_stride, const QuantizedRows& x, int64_t r0,
                                 const UnpackedChunk* w, int64_t s0, int64_t steps, bool fetch) {
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
    if (fetch) {
#pragma GCC unroll kUnroll
      for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll kUnroll
        for (int64_t i = 0; i < Format::Fields::kBytes; i += 64) fetch_far(w[p].later + s * Format::Fields::kBytes + i);
    }
    Ints sum[kRows][kVecs][kDots];
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
      for (int g = 0; g < kDots; ++g) {
        const Ints start = hn::Set(IntLanes(), x_starts[(r * kChunkSteps + s) * kDots + g]);
#pragma GCC unroll kUnroll
        for (int v = 0; v < kVecs; ++v) sum[r][v][g] = start;
      }
#pragma GCC unroll kUnroll
    for (int i = 0; i < kStepVectors; ++i) {
      Words words[kVecs];
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v)
        words[v] = load_words(w[v / kPanelVectors].codes + s * kStepBytes + i * 64 + v % kPanelVectors * kLanes * 4);
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r) {
        const Ints bytes = broadcast_bytes(x_codes + (r * kChunkSteps + s) * kStep + i * 4);
#pragma GCC unroll kUnroll
        for (int v = 0; v < kVecs; ++v)
          sum[r][v][i / kDotVectors] = Dot::dot(sum[r][v][i / kDotVectors], words[v], bytes);
      }
    }
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) {
      const float* scratch = w[v / kPanelVectors].scratch + v % kPanelVectors * kLanes;
      Vec scales[kDots];
#pragma GCC unroll 2
      for (int g = 0; g < kDots; ++g) scales[g] = load(scratch + kScalesAt + (s * kDots + g) * kPanelWidth);
#pragma GCC unroll kUnroll
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
  bool first = true;
  const auto tiles = [&](auto size) {
    constexpr int kRows = decltype(size)::value;
    if constexpr (kRows <= kMaxRows)
      for (; rows >= kRows; rows -= kRows, r0 += kRows, c += kRows * c_stride, first = false)
        quantized_tile<Dot, Format, kRows, kPanels>(c, c_stride, x, r0, w, s0, steps, first);
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
      supers[p] = load_supers<Format>(w.supers + p * w.supers_stride, n);
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
        Ints sums[kGroups];
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g)
          sums[g] = Format::kFolded ? hn::Zero(IntLanes()) : hn::Set(IntLanes(), x.starts[step * kGroups + g]);
#pragma GCC unroll kUnroll
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
#pragma GCC unroll kUnroll
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
    constexpr int64_t kLater = 2 * kChunkSteps * Fields::kBytes;
    const int64_t later =
        StreamAhead(chunk.quants_stride, (panels - 1) * chunk.quants_stride).offset(s0 * Fields::kBytes, kLater);
    for (int64_t p = 0; p < panels; ++p) {
      float* panel_scratch = scratch + p * kScratchFloats;
      const uint8_t* quants = chunk.quants + p * chunk.quants_stride;
      unpack_chunk<Format>(panel_scratch, quants, chunk.scales + p * chunk.scales_stride,
                           chunk.supers + p * chunk.supers_stride, steps, table, w.layout->zero);
      unpacked[p] = {Fields::kBytes < kStepBytes ? reinterpret_cast<const uint8_t*>(panel_scratch) : quants,
                     panel_scratch, quants + later};
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
void product_byte_dots(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                       int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  product_with<DotBytes>(c, x, w, k_size, r0, rows, p0, panels, scratch);
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(quantize_row_range);
HWY_EXPORT(product);
HWY_EXPORT(product_byte_dots);

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
  device.pool().parallel_ranges(q.rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(k_size, 1)),
                                [&](int64_t begin, int64_t end) { quantize(q, x, x_stride, k_size, begin, end); });
}

QuantizedProduct quantized_product(const QuantizedLayout& layout, Isa isa) {
  if (layout.whole_rows()) return row_scale_product(isa);
  return has_byte_dots(isa) ? EADEM_CPU_DISPATCH(product_byte_dots, isa) : EADEM_CPU_DISPATCH(product, isa);
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
