// SPDX-License-Identifier: Apache-2.0
//
// The product for many rows: weights are unpacked a chunk at a time, in the first-level cache, to one byte a code and
// f32 scales, and all rows of the task use them. 8-bit codes are read in place, unless tiles of AMX multiply them.
#include "eadem/kernels/cpu/linear/quantized/quantized_matmul.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/quantized/quantized_matmul.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/quantized/integer_tiles-inl.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_steps-inl.h"
#include "eadem/kernels/cpu/linear/quantized/step_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// ---- Unpacking a chunk.

// Multiplies the codes of a group by its `sub_scale` for a folded layout. `sub_scale` holds two copies of an i16 in
// each word. Without mins, 124 - zero * sub_scale is added to each byte. 16-bit arithmetic makes two bytes at once:
// carries between them cancel modulo 2^16, because both results lie in 0 … 255.
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

// Adds a number to each byte: signed levels of codes, for tiles, and the codes of such levels. Targets without tiles do
// not call it.
[[maybe_unused]] HWY_INLINE Words add_to_bytes(Words bytes, int number) {
#if HWY_TARGET == HWY_SCALAR
  uint32_t word = hn::GetLane(bytes), result = 0;
  for (int j = 0; j < 32; j += 8) result |= (((word >> j) + static_cast<uint32_t>(number)) & 0xff) << j;
  return hn::Set(WordLanes(), result);
#else
  const hn::Repartition<uint8_t, WordLanes> d8;
  return hn::BitCast(WordLanes(), hn::Add(hn::BitCast(d8, bytes), hn::Set(d8, static_cast<uint8_t>(number))));
#endif
}

template <typename Format>
HWY_INLINE void fetch_step(const uint8_t* quants, const uint8_t* scales) {
#pragma GCC unroll kUnroll
  for (int64_t i = 0; i < Format::Fields::kBytes; i += 64) fetch_near(quants + kFetchNear + i);
  fetch_near(scales + kFetchScaleSteps * Format::kScaleBytes);
}

// Unpacks the chunk of a panel into its scratch: codes [steps, 8, 16, 4] (unless they are stored as bytes), scales
// [steps, dots, 16] and mins [steps, 16]; for folded layouts also the pairs of their mins [steps, 16]. With kLevels,
// codes that are not folded become signed levels, also those stored as bytes.
template <typename Format, bool kLevels>
void unpack_chunk(float* scratch, const PackedChunk& panel, int64_t steps, const uint8_t* table, int zero) {
  using Fields = typename Format::Fields;
  const uint8_t *quants = panel.quants, *scale_bytes = panel.scales;
  const f16_t* supers = panel.supers;
  auto* codes = reinterpret_cast<uint8_t*>(scratch);
  float *scales = scratch + kScalesAt, *mins = scratch + kMinsAt, *min_pairs = scratch + kMinPairsAt;
  for (int64_t s = 0; s < steps; ++s) {
    fetch_step<Format>(quants, scale_bytes);
#pragma GCC unroll kUnroll
    for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
      const StepScales<Format> step(scale_bytes, n, load_supers<Format>(supers, n, panel.supers_unit));
#pragma GCC unroll 2
      for (int g = 0; g < Format::kDots; ++g) store(step.scale[g], scales + g * kPanelWidth + n);
      if constexpr (Format::kMin) store(step.min, mins + n);
      if constexpr (Format::kMin && Format::kFolded) store(hn::BitCast(Lanes(), step.min_pair), min_pairs + n);
      if constexpr (Fields::kBytes < kStepBytes || kLevels) {
        const Fields fields(quants, n);
        Words low = hn::Zero(WordLanes()), high = low;
        if constexpr (Format::kFolded) {
          low = hn::BitCast(WordLanes(), pair_of(step.pair, step.pair));
          high = hn::BitCast(WordLanes(), pair_of(hn::ShiftRight<16>(step.pair), hn::ShiftRight<16>(step.pair)));
        }
#pragma GCC unroll kUnroll
        for (int i = 0; i < kStepVectors; ++i) {
          Words bytes = fields.codes(i, table);
          if constexpr (Format::kFolded)
            bytes = fold<Format::kMin>(bytes, i < kStepVectors / 2 ? low : high, zero);
          else if constexpr (kLevels)
            bytes = add_to_bytes(bytes, -zero);
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

// ---- The tile. It keeps the integer sums of a step in registers, and the f32 chains beside them if they fit: the rows
// of a chunk take more than the first-level cache, and storing chains at every step delays the products.

inline constexpr bool kChainsInRegisters = HWY_TARGET == HWY_AVX3;
// With 32 registers, two panels of 6 rows have 12 sums and 12 chains; if a step has two sums, 4 rows have 16 and 8.
constexpr int tile_rows(int dots) {
  if (!kChainsInRegisters) return kSumRows / dots;
  return dots == 1 ? 6 : 4;
}

// c [kRows, kPanels * 16] += rows r0 … of x times the chunks w, which begin at step s0. At each step, `fetch_bytes`
// bytes of later packed chunks are prefetched, because memory would be idle otherwise. kLevels: the chunk was unpacked
// to signed levels.
template <typename Dot, typename Tile, bool kLevels, int kRows, int kPanels>
HWY_NOINLINE void quantized_tile(float* HWY_RESTRICT c, int64_t c_stride, const QuantizedRows& x, int64_t r0,
                                 const UnpackedChunk* w, int64_t s0, int64_t steps, int64_t fetch_bytes) {
  constexpr int kVecs = kPanels * kPanelVectors, kDots = Tile::kDots;
  constexpr int kDotVectors = static_cast<int>(kStepVectors) / kDots;
  const int64_t first = x.step(r0, s0);
  const int8_t* x_codes = x.codes + first * kStep;
  const float* x_scales = x.scales + first;
  const int32_t* x_starts = x.starts + first * kDots;
  const float* x_sums = x.sums + first;
  const int32_t* x_pairs = x.pairs + first;
  Vec chains[kChainsInRegisters ? kRows : 1][kVecs];
  if constexpr (kChainsInRegisters)
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v) chains[r][v] = load(c + r * c_stride + v * kLanes);
  int64_t fetched = 0;
  for (int64_t s = 0; s < steps; ++s) {
    for (const int64_t end = fetched + fetch_bytes; fetched < end; fetched += 64)
#pragma GCC unroll kUnroll
      for (int p = 0; p < kPanels; ++p) fetch_far(w[p].later + fetched);

    // 1. The sums of the step, or of its halves.
    Ints sums[kDots][kRows][kVecs];
    const auto words_at = [&](int i, int v) {
      const Words bytes =
          load_words(w[v / kPanelVectors].codes + s * kStepBytes + i * 64 + v % kPanelVectors * kLanes * 4);
      if constexpr (kLevels) return add_to_bytes(bytes, x.layout->zero);
      return bytes;
    };
    const auto start_of = [&](int g) {
      return [=](int r, int /*v*/) { return hn::Set(IntLanes(), x_starts[(r * kChunkSteps + s) * kDots + g]); };
    };
    make_dots<Dot, 0, kDotVectors>(sums[0], x_codes + s * kStep, words_at, start_of(0));
    if constexpr (kDots == 2)
      make_dots<Dot, kDotVectors, 2 * kDotVectors>(sums[1], x_codes + s * kStep, words_at, start_of(1));

      // 2. Multiply the sums by the scales and subtract the part of the mins.
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVecs; ++v) {
      const float* scratch = w[v / kPanelVectors].scratch + v % kPanelVectors * kLanes;
      Vec scales[kDots];
#pragma GCC unroll 2
      for (int g = 0; g < kDots; ++g) scales[g] = load(scratch + kScalesAt + (s * kDots + g) * kPanelWidth);
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t step = r * kChunkSteps + s;
        float* stored = c + r * c_stride + v * kLanes;
        Vec acc = kChainsInRegisters ? chains[kChainsInRegisters ? r : 0][v] : load(stored);
        Ints dots[kDots];
#pragma GCC unroll 2
        for (int g = 0; g < kDots; ++g) dots[g] = sums[g][r][v];
        if constexpr (Tile::kMin) {
          Vec x_sum;
          if constexpr (Tile::kFolded) {
            const Ints min_pairs = hn::BitCast(IntLanes(), load(scratch + kMinPairsAt + s * kPanelWidth));
            x_sum = hn::ConvertTo(Lanes(), dot_pairs(min_pairs, hn::Set(IntLanes(), x_pairs[step])));
          } else {
            x_sum = set(x_sums[step]);
          }
          acc = add_step<Tile>(acc, dots, x_scales[step], scales, x_sum, load(scratch + kMinsAt + s * kPanelWidth));
        } else {
          acc = add_step<Tile>(acc, dots, x_scales[step], scales);
        }
        if constexpr (kChainsInRegisters)
          chains[r][v] = acc;
        else
          store(acc, stored);
      }
    }
  }
  if constexpr (kChainsInRegisters)
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v) store(chains[r][v], c + r * c_stride + v * kLanes);
}

// Multiplies all rows by all panels. The codes of a packed step take `step_bytes`. Only the first rows of a panel
// prefetch.
template <typename Dot, typename Tile, bool kLevels>
void quantized_tiles(float* c, const QuantizedRows& x, int64_t r0, int64_t rows, const UnpackedChunk* w, int64_t panels,
                     int64_t s0, int64_t steps, int64_t step_bytes) {
  const int64_t c_stride = panels * kPanelWidth;
  cut_into<kSumPanels, 1>(panels, [&](auto width, int64_t p) {
    cut_into<tile_rows(Tile::kDots), 8, 4, 2, 1>(rows, [&](auto height, int64_t r) {
      quantized_tile<Dot, Tile, kLevels, decltype(height)::value, decltype(width)::value>(
          c + r * c_stride + p * kPanelWidth, c_stride, x, r0 + r, w + p, s0, steps, r == 0 ? step_bytes : 0);
    });
  });
}

// ---- The product.

// Formats that tiles multiply faster than dot products do (step_tiles-inl.h).
template <typename Format>
inline constexpr bool kOnTiles = (HWY_TARGET == HWY_AVX3) && Format::kDots == 1;
// Rows from which on they do. The rows that do not fill a tile are multiplied by dot products, which give the same
// bits. 768 outputs, 2048 inputs, one thread of an Emerald Rapids, microseconds of q4_k and mxfp4: 32 rows take 290 and
// 271 by dot products alone and 265 and 228 on tiles, 42 rows 376 and 356 and 342 and 304. Copying the last rows beside
// zeros to fill a tile was slower: 28 rows took 254 and 236 by dot products, 303 and 262 so.
inline constexpr int64_t kLeastTileRows = 32;

template <template <int> typename Dot, typename Format, bool kTiles>
void product_of_format(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size, int64_t r0,
                       int64_t rows, int64_t p0, int64_t panels, float* scratch) {
  using Fields = typename Format::Fields;
  if constexpr (kTiles)
    if (rows < kLeastTileRows)
      return product_of_format<Dot, Format, false>(c, x, w, k_size, r0, rows, p0, panels, scratch);
  const int64_t all_steps = k_size / kStep;
  std::memset(c, 0, static_cast<size_t>(rows * panels * kPanelWidth) * sizeof(float));
#if HWY_TARGET == HWY_AVX3
  if constexpr (kTiles) configure_step_tiles();
#endif
  for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, all_steps - s0);
    const PackedChunk chunk = packed_chunk<Format>(w, all_steps, p0, panels, s0, steps, scratch);
    constexpr int64_t kSuperBytes = kPanelWidth * (Format::kMin ? 2 : 1) * static_cast<int64_t>(sizeof(f16_t));
    const int64_t supers_bytes = chunk.supers_stride * static_cast<int64_t>(sizeof(f16_t));
    constexpr int64_t kLater = 2 * kChunkSteps * Fields::kBytes;
    const int64_t later =
        StreamAhead(chunk.quants_stride, (panels - 1) * chunk.quants_stride).offset(s0 * Fields::kBytes, kLater);
    // Unpacking the next chunk also reads its scales and super-scales.
    const int64_t next_scales = StreamAhead(chunk.scales_stride, (panels - 1) * chunk.scales_stride)
                                    .offset(s0 * Format::kScaleBytes, kChunkSteps * Format::kScaleBytes);
    const int64_t next_supers =
        StreamAhead(supers_bytes, (panels - 1) * supers_bytes).offset(s0 / kChunkSteps * kSuperBytes, kSuperBytes);
    UnpackedChunk unpacked[kMaxGroupPanels];
    for (int64_t p = 0; p < panels; ++p) {
      const PackedChunk panel = chunk.from_panel(p);
      if constexpr (!Format::kExpanded)
        for (int64_t i = 0; i < kChunkSteps * Format::kScaleBytes; i += 64) fetch_far(panel.scales + next_scales + i);
      if constexpr (Format::kSupers) fetch_far(reinterpret_cast<const uint8_t*>(panel.supers) + next_supers);
      float* to = scratch + p * kScratchFloats;
      unpack_chunk<Format, kTiles>(to, panel, steps, w.layout->table.data(), w.layout->zero);
      const bool in_place = Fields::kBytes == kStepBytes && !kTiles;
      unpacked[p] = {in_place ? panel.quants : reinterpret_cast<const uint8_t*>(to), to, panel.quants + later};
    }
#if HWY_TARGET == HWY_AVX3
    if constexpr (kTiles) {
      // A level of q3_k times its sub-scale may be 128, so its bytes stay unsigned.
      const int64_t on_tiles = rows / kTileRows * kTileRows;
      quantized_on_tiles<typename Format::Tile, Format::kFolded && !Format::kMin>(c, x, r0, on_tiles, unpacked, panels,
                                                                                  s0, steps, Fields::kBytes);
      quantized_tiles<Dot<Format::kTileBits>, typename Format::Tile, !Format::kFolded>(
          c + on_tiles * panels * kPanelWidth, x, r0 + on_tiles, rows - on_tiles, unpacked, panels, s0, steps, 0);
      continue;
    }
#endif
    quantized_tiles<Dot<Format::kTileBits>, typename Format::Tile, false>(c, x, r0, rows, unpacked, panels, s0, steps,
                                                                          Fields::kBytes);
  }
#if HWY_TARGET == HWY_AVX3
  if constexpr (kTiles) release_tiles();
#endif
}

template <template <int> typename Dot, bool kTiles = false>
QuantizedProduct product_with(const QuantizedFormat& format) {
  QuantizedProduct result = nullptr;
  with_format(format, [&](auto constant) {
    using Format = decltype(constant);
    constexpr bool kOn = kTiles && kOnTiles<Format>;
    result = product_of_format<Dot, Format, kOn>;
  });
  return result;
}

QuantizedProduct product(const QuantizedFormat& format) { return product_with<DotPairs>(format); }
// For processors of this target that have the 8-bit dot product, and for those that also have tiles.
QuantizedProduct product_byte_dots(const QuantizedFormat& format) { return product_with<DotBytes>(format); }
QuantizedProduct product_tiles(const QuantizedFormat& format) { return product_with<DotBytes, true>(format); }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(product);
EADEM_CPU_EXPORT(product_byte_dots);
EADEM_CPU_EXPORT(product_tiles);

QuantizedProduct block_product(const QuantizedFormat& format, Isa isa) {
  if (isa == Isa::amx) return EADEM_CPU_DISPATCH(product_tiles, isa)(format);
  return has_byte_dots(isa) ? EADEM_CPU_DISPATCH(product_byte_dots, isa)(format)
                            : EADEM_CPU_DISPATCH(product, isa)(format);
}

QuantizedRoutines quantized_routines(const QuantizedLayout& layout, Isa isa) {
  const RowRoutines rows = row_routines(isa);
  if (layout.whole_rows()) {
    const QuantizedProduct product = row_scale_product(layout, isa);
    return {rows, product, product};
  }
  return {rows, few_rows_product(layout.format(), isa), block_product(layout.format(), isa), most_few_rows(isa)};
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
