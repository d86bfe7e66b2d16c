// SPDX-License-Identifier: Apache-2.0
//
// Products with integers that have one scale for each output (quantized_matmul.h). A chunk of k is summed in integers,
// by dot products of bytes, or on AMX tiles if the processor has them and there is more than one row.
#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/linear/amx.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/row_scale_matmul.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/quantized/integer_tiles-inl.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_steps-inl.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Panels that a single row multiplies side by side.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kRowPanels = 4;
#else
inline constexpr int kRowPanels = HWY_TARGET == HWY_SCALAR ? 1 : 2;
#endif

// A chunk of neighbouring panels, `stride` bytes apart.
struct ChunkPanels {
  const uint8_t* codes;
  int64_t stride;
};

// c [kRows, kPanels * 16] += rows r0 … of x times the chunk that begins at step s0; each output is one integer sum.
template <typename Dot, int kBits, int kRows, int kPanels>
HWY_NOINLINE void chunk_tile(float* HWY_RESTRICT c, int64_t c_stride, const QuantizedRows& x, int64_t r0,
                             const ChunkPanels& w, int64_t s0, int64_t steps) {
  using Fields = CodeFields<kBits, 0, false>;
  constexpr int kVecs = kPanels * kPanelVectors;
  const int64_t first = x.step(r0, s0);
  const StreamAhead ahead(w.stride, (kPanels - 1) * w.stride);  // for a single row, which is bound by reading weights
  Ints sums[kRows][kVecs];
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::Set(IntLanes(), x.starts[first + r * kChunkSteps]);
  for (int64_t s = 0; s < steps; ++s) {
    const uint8_t* codes = w.codes + s * Fields::kBytes;
    if constexpr (kRows == 1) {
      const int64_t at = (s0 + s) * Fields::kBytes, near = ahead.offset(at, kFetchNear),
                    far = ahead.offset(at, kFetchFar);
#pragma GCC unroll kUnroll
      for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll kUnroll
        for (int64_t i = 0; i < Fields::kBytes; i += 64) {
          fetch_near(codes + p * w.stride + near + i);
          fetch_far(codes + p * w.stride + far + i);
        }
    }
    make_dots<Dot, 0, kStepVectors>(
        sums, x.codes + (first + s) * kStep,
        [&](int i, int v) {
          return Fields::codes_at(codes + v / kPanelVectors * w.stride, v % kPanelVectors * kLanes, i);
        },
        [&](int r, int v) { return sums[r][v]; });
  }
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) {
      float* acc = c + r * c_stride + v * kLanes;
      store(hn::MulAdd(set(x.scales[first + r * kChunkSteps]), hn::ConvertTo(Lanes(), sums[r][v]), load(acc)), acc);
    }
}

// Multiplies rows by all panels, whose codes are bytes.
template <typename Dot>
void chunk_panels(float* c, const QuantizedRows& x, int64_t r0, int64_t rows, const ChunkPanels& w, int64_t panels,
                  int64_t s0, int64_t steps) {
  const int64_t c_stride = panels * kPanelWidth;
  cut_into<kSumPanels, 1>(panels, [&](auto width, int64_t p) {
    cut_into<kSumRows, 6, 2, 1>(rows, [&](auto height, int64_t r) {
      chunk_tile<Dot, 8, decltype(height)::value, decltype(width)::value>(
          c + r * c_stride + p * kPanelWidth, c_stride, x, r0 + r, {w.codes + p * w.stride, w.stride}, s0, steps);
    });
  });
}

// Multiplies a single row by all panels, reading codes as they are stored.
template <typename Dot, int kBits>
void chunk_row(float* c, const QuantizedRows& x, int64_t r0, const ChunkPanels& w, int64_t panels, int64_t s0,
               int64_t steps) {
  cut_into<kRowPanels, 1>(panels, [&](auto width, int64_t p) {
    chunk_tile<Dot, kBits, 1, decltype(width)::value>(c + p * kPanelWidth, 0, x, r0, {w.codes + p * w.stride, w.stride},
                                                      s0, steps);
  });
}

// Multiplies rows by all panels on tiles. `next` is the chunk that follows, or null.
void chunk_on_tiles(float* c, const QuantizedRows& x, int64_t r0, int64_t rows, const ChunkPanels& w, int64_t panels,
                    int64_t s0, int64_t steps, const uint8_t* next) {
  constexpr int64_t kLine = kChunkSteps * kStep, kTileSteps = kTileLine / kStep;
  const int64_t first = x.step(r0, s0);
  const TileRows a{x.codes + first * kStep, 0, 2 * kTileRows * kLine, kTileLine, kTileRows * kLine, kLine};
  int8_tiles(c, panels * kPanelWidth, a, {w.codes, w.stride}, {x.starts + first, x.scales + first, kChunkSteps}, rows,
             panels, steps / kTileSteps, next);
}

// Multiplies c [rows, 16] by the scales of panel p and subtracts the part of the mins.
template <typename Stored>
void scale_panel(float* c, int64_t c_stride, const QuantizedRows& x, const QuantizedWeight& w, const Stored* scales,
                 int64_t r0, int64_t rows, int64_t p) {
  for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
    const Vec scale = load(scales + p * kPanelWidth + n);
    Vec min = zero();
    if (w.layout->has_min) {
      const Ints above = hn::Sub(load_bytes(w.zeros + p * kPanelWidth + n), hn::Set(IntLanes(), w.layout->zero));
      min = hn::Mul(scale, hn::ConvertTo(Lanes(), above));
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* acc = c + r * c_stride + n;
      const Vec product = hn::Mul(load(acc), scale);
      store(w.layout->has_min ? hn::NegMulAdd(set(x.sums[r0 + r]), min, product) : product, acc);
    }
  }
}

template <template <int> typename Dot, bool kTiles, typename Stored>
void row_scale_product_with(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                            int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  const int64_t all_steps = k_size / kStep, step_bytes = w.layout->quant_bytes(), stride = all_steps * step_bytes;
  auto* unpacked = reinterpret_cast<uint8_t*>(scratch);
  std::memset(c, 0, static_cast<size_t>(rows * panels * kPanelWidth) * sizeof(float));
  for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, all_steps - s0);
    ChunkPanels chunk{w.quants + p0 * stride + s0 * step_bytes, stride};
    if (rows == 1) {
      if (w.layout->code_bits == 4)
        chunk_row<Dot<4>, 4>(c, x, r0, chunk, panels, s0, steps);
      else
        chunk_row<Dot<8>, 8>(c, x, r0, chunk, panels, s0, steps);
      continue;
    }
    const uint8_t* next = s0 + steps < all_steps ? chunk.codes + steps * step_bytes : w.quants + (p0 + panels) * stride;
    // 1. Expand 4-bit codes to bytes.
    if (w.layout->code_bits == 4) {
      for (int64_t p = 0; p < panels; ++p)
        for (int64_t s = 0; s < steps; ++s)
          for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
            const CodeFields<4, 0, false> fields(chunk.codes + p * stride + s * step_bytes, n);
#pragma GCC unroll kUnroll
            for (int i = 0; i < kStepVectors; ++i)
              store_words(fields.codes(i, nullptr), unpacked + (p * kChunkSteps + s) * kStepBytes + i * 64 + n * 4);
          }
      chunk = {unpacked, kChunkSteps * kStepBytes};
      next = nullptr;
    }
    // 2. Sum the chunk and multiply by the scales of x.
    if (kTiles && steps % 2 == 0)
      chunk_on_tiles(c, x, r0, rows, chunk, panels, s0, steps, next);
    else if (w.layout->code_bits == 4)
      chunk_panels<Dot<4>>(c, x, r0, rows, chunk, panels, s0, steps);
    else
      chunk_panels<Dot<8>>(c, x, r0, rows, chunk, panels, s0, steps);
  }
  // 3. Multiply by the scales of the outputs.
  const int64_t c_stride = panels * kPanelWidth;
  const Stored* scales = reinterpret_cast<const Stored*>(w.scales);
  for (int64_t p = 0; p < panels; ++p) scale_panel(c + p * kPanelWidth, c_stride, x, w, scales, r0, rows, p0 + p);
}

template <template <int> typename Dot, bool kTiles>
QuantizedProduct row_scales_with(DType scales) {
  return with_dtype(scales, [](auto* type) -> QuantizedProduct {
    return row_scale_product_with<Dot, kTiles, ElementOf<decltype(type)>>;
  });
}

QuantizedProduct row_scales(DType scales) { return row_scales_with<DotPairs, false>(scales); }
// For processors of this target that have the 8-bit dot product, and for those that also have tiles.
QuantizedProduct row_scales_byte_dots(DType scales) { return row_scales_with<DotBytes, false>(scales); }
QuantizedProduct row_scales_tiles(DType scales) { return row_scales_with<DotBytes, true>(scales); }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(row_scales);
EADEM_CPU_EXPORT(row_scales_byte_dots);
EADEM_CPU_EXPORT(row_scales_tiles);

QuantizedProduct row_scale_product(const QuantizedLayout& layout, Isa isa) {
  const DType scales = layout.group_scales;
  if (isa == Isa::amx) return EADEM_CPU_DISPATCH(row_scales_tiles, isa)(scales);
  return has_byte_dots(isa) ? EADEM_CPU_DISPATCH(row_scales_byte_dots, isa)(scales)
                            : EADEM_CPU_DISPATCH(row_scales, isa)(scales);
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
