// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/matmul.h"

#include <algorithm>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/matmul.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/amx.h"
#include "eadem/kernels/cpu/linear/fp8_decode-inl.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"
#include "eadem/kernels/cpu/linear/round_rows-inl.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/cpu/weight_reader.h"

#ifndef EADEM_KERNELS_CPU_MATMUL_BLOCKS_
#define EADEM_KERNELS_CPU_MATMUL_BLOCKS_
namespace eadem::kernels::cpu {
namespace {

constexpr int64_t kGroupPanels = 4;   // panels whose weights are prepared and used together
constexpr int64_t kKBlock = 256;      // 4 panels x 256 x 64 B = 64 KB: in the second-level cache, read once per 6 rows
constexpr int64_t kBlockPanels = 16;  // panels that meet one block of a while it is in the second-level cache
constexpr int64_t kRowBlock = 192;    // a multiple of every tile's rows; weights are read once per block
// Quantized weights are unpacked once per block, which costs as much as some tens of rows. The rows of a chunk and
// their results (512 x 256 B each) stay in the second-level cache. Where there are few panels, threads share a block.
constexpr int64_t kQuantizedRowBlock = 512, kQuantizedShortestRows = 96;
// AMX products are so fast that reading either operand takes as long, so blocks have more panels and more rows.
constexpr int64_t kTileGroupPanels = 8, kTileRowBlock = 256;
constexpr int64_t kTileShortestRows = 64;  // rows of a task
// Rows of more values do not stay in the second-level cache until the next group of panels, so groups are larger.
constexpr int64_t kTileLongRow = 4096, kTileLongGroupPanels = 32;
// Up to this many rows, 16-bit weights are widened in registers as they are read, because decode is bound by memory.
// For more rows, the first rows of a block store the widened weights for the others.
constexpr int64_t kWidenInRegistersRows = 8;

// 8-bit floats are decoded to f32, except for a single row. For few rows, so little is decoded at a time that it stays
// in the first-level cache (4 panels x 64, 16 KB).
constexpr int64_t fp8_block(int64_t rows) { return rows <= kWidenInRegistersRows ? 64 : kKBlock; }

// If b is a matrix, both operands are copied block by block, and more panels share one copy of a.
constexpr int64_t kMatrixGroupPanels = 16;
constexpr int64_t kCopiedRowStride = kRowBlock + kPanelWidth;  // an odd number of cache lines uses every set

constexpr int64_t kPackedFloats = kGroupPanels * kKBlock * kPanelWidth;
constexpr int64_t kUnpackedBytes =
    std::max(kMaxGroupPanels * kChunkScratchBytes, kTileGroupPanels* kChunkSteps* kStepBytes);
constexpr int64_t kUnpackedFloats = kUnpackedBytes / static_cast<int64_t>(sizeof(float));
constexpr int64_t kMatrixProductFloats = kRowBlock * kMatrixGroupPanels * kPanelWidth;
constexpr int64_t kCopiedFloats = kCopiedRowStride * kKBlock;

using Source = MatmulTypes::Source;

constexpr int64_t floats_of(const MatmulPlan::Blocks& blocks) { return blocks.rows * blocks.panels * kPanelWidth; }

constexpr MatmulPlan::Blocks kTileBlocks{kTileRowBlock, kTileGroupPanels, 2, kTileShortestRows};
constexpr MatmulPlan::Blocks kTileLongBlocks{kTileRowBlock, kTileLongGroupPanels, 2, kTileShortestRows};
// Blocks of products by vdpbf16ps. Their columns are multiples of the panels that bf16_dots.cc computes together.
constexpr MatmulPlan::Blocks kDotBlocks{kTileRowBlock, 12, 3, kTileShortestRows},
    kDotRowBlocks{kTileRowBlock, 12, 4, kTileShortestRows};
constexpr MatmulPlan::Blocks blocks_of(Source source) {
  switch (source) {
    case Source::matrix: return {kRowBlock, kMatrixGroupPanels, kMatrixGroupPanels, kRowBlock};
    case Source::quantized: return {kQuantizedRowBlock, kMaxGroupPanels, kMaxGroupPanels, kQuantizedShortestRows};
    default: return {kRowBlock, kBlockPanels, kGroupPanels, kRowBlock};
  }
}

// The part of a worker's scratch into which b is copied, widened or unpacked.
constexpr int64_t packed_floats(Source source) {
  switch (source) {
    case Source::panels:
    case Source::fp8:
    case Source::decoded:
    case Source::matrix: return kPackedFloats;
    case Source::vnni: return 0;
    case Source::quantized: break;
  }
  return kUnpackedFloats;
}

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Copies a block of k of `panels` panels from a matrix stored by rows; columns past `outputs` are zero.
void gather_panels(float* packed, const float* b, int64_t b_stride, int64_t outputs, int64_t p0, int64_t panels,
                   int64_t k0, int64_t k_size) {
  const int64_t width = std::min(panels * kPanelWidth, outputs - p0 * kPanelWidth);
  for (int64_t k = 0; k < k_size; ++k) {
    const float* row = b + (k0 + k) * b_stride + p0 * kPanelWidth;
    for (int64_t n = 0; n < width; n += kPanelWidth) {
      float* out = packed + ((n / kPanelWidth) * k_size + k) * kPanelWidth;
      const int64_t lanes = std::min(kPanelWidth, width - n);
      if (lanes == kPanelWidth)
        for (int64_t i = 0; i < kPanelWidth; i += kLanes) store(load(row + n + i), out + i);
      else
        for (int64_t i = 0; i < kPanelWidth; ++i) out[i] = i < lanes ? row[n + i] : 0.0f;
    }
  }
}

template <typename W>
void product_block(float* c, int64_t c_stride, const RowOperand& a, const W* b, int64_t k_size, int64_t rows,
                   int64_t panels) {
  matmul_block(c, c_stride, false, a, PanelOperand<W>{b, k_size * kPanelWidth, kPanelWidth}, rows, panels, k_size);
}

// Calls block(k0, k_size, p, group, next_k0, next_p) for each block of `k_step` values of k and, within it, for each
// group of panels. next_k0 and next_p say where the next block begins; after the last one, next_p is `panels`.
template <typename F>
void for_each_block(int64_t k_size, int64_t k_step, int64_t panels, F&& block) {
  for (int64_t k0 = 0; k0 < k_size || k0 == 0; k0 += k_step)
    for (int64_t p = 0; p < panels; p += kGroupPanels) {
      const int64_t behind = p + kGroupPanels;
      if (behind < panels)
        block(k0, std::min(k_step, k_size - k0), p, kGroupPanels, k0, behind);
      else
        block(k0, std::min(k_step, k_size - k0), p, panels - p, k0 + k_step, k0 + k_step < k_size ? 0 : panels);
    }
}

// The cache lines that the block at k0 reads of a group of panels from p on: 16 values of `W` for each k.
template <typename W>
Fetch fetch_block(const W* first_panel, int64_t k_size, int64_t k_step, int64_t k0, int64_t p, int64_t panels) {
  if (p >= panels) return {};
  constexpr int64_t kBytes = kPanelWidth * static_cast<int64_t>(sizeof(W));
  return {first_panel + (p * k_size + k0) * kPanelWidth, std::min(k_step, k_size - k0) * kBytes, k_size * kBytes,
          std::min(kGroupPanels, panels - p)};
}

// Computes c [rows, panels * 16] = a b for `panels` packed panels from `b` on.
template <typename W>
void product_of_panels(float* c, int64_t k_size, const W* b, const RowOperand& a, int64_t rows, int64_t panels,
                       float* packed) {
  const int64_t c_stride = panels * kPanelWidth, panel_size = k_size * kPanelWidth;
  // 1. Few rows: read the weights once, in place.
  if (rows <= kWidenInRegistersRows) return product_block(c, c_stride, a, b, k_size, rows, panels);

  // 2. Many rows: take one block of k at a time, so that the panels stay in cache while the rows pass by.
  for_each_block(k_size, kKBlock, panels,
                 [&](int64_t k0, int64_t block_k, int64_t p, int64_t group, int64_t next_k0, int64_t next_p) {
                   matmul_block(c + p * kPanelWidth, c_stride, k0 > 0,
                                RowOperand{a.data + k0 * a.k_stride, a.row_stride, a.k_stride},
                                PanelOperand<W>{b + p * panel_size + k0 * kPanelWidth, panel_size, kPanelWidth}, rows,
                                group, block_k, fetch_block(b, k_size, kKBlock, next_k0, next_p, panels), packed);
                 });
}

RowOperand rows_from(const Matmul& m, int64_t row) {
  return {m.a + row * m.a_row_stride, m.a_row_stride, m.a_k_stride};
}

// ---- Routines of MatmulPlan::Product.

template <typename W>
void packed_product(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows&, int64_t row, int64_t rows,
                    int64_t p0, int64_t panels, float* packed) {
  product_of_panels(c, m.k_size, static_cast<const W*>(b.data) + p0 * m.k_size * kPanelWidth, rows_from(m, row), rows,
                    panels, packed);
}

template <bool kE5m2>
void fp8_product(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows&, int64_t row, int64_t rows,
                 int64_t p0, int64_t panels, float* packed) {
  const Fp8Weight& w = b.fp8;
  const RowOperand a = rows_from(m, row);
  if (rows == 1) return fp8_row_panels<kE5m2>(c, a, w, m.k_size, p0, panels);
  const int64_t c_stride = panels * kPanelWidth, k_step = fp8_block(rows);
  const uint8_t* codes = w.codes + p0 * m.k_size * kPanelWidth;
  for_each_block(m.k_size, k_step, panels,
                 [&](int64_t k0, int64_t k_size, int64_t p, int64_t group, int64_t next_k0, int64_t next_p) {
                   decode_panels<kE5m2>(packed, w, m.k_size, p0 + p, group, k0, k_size);
                   matmul_block(c + p * kPanelWidth, c_stride, k0 > 0,
                                RowOperand{a.data + k0 * a.k_stride, a.row_stride, a.k_stride},
                                PanelOperand<float>{packed, k_size * kPanelWidth, kPanelWidth}, rows, group, k_size,
                                fetch_block(codes, m.k_size, k_step, next_k0, next_p, panels));
                 });
}

void decoded_product(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows& x, int64_t row, int64_t rows,
                     int64_t p0, int64_t panels, float* packed) {
  const RowOperand a = x.ordered == nullptr ? rows_from(m, row) : RowOperand{x.ordered + row * m.k_size, m.k_size, 1};
  const int64_t c_stride = panels * kPanelWidth;
  for_each_block(m.k_size, kKBlock, panels,
                 [&](int64_t k0, int64_t k_size, int64_t p, int64_t group, int64_t, int64_t) {
                   for (int64_t g = 0; g < group; ++g)
                     x.decode(packed + g * k_size * kPanelWidth, b.quantized, m.k_size / kStep, p0 + p + g, k0 / kStep,
                              k_size / kStep);
                   matmul_block(c + p * kPanelWidth, c_stride, k0 > 0,
                                RowOperand{a.data + k0 * a.k_stride, a.row_stride, a.k_stride},
                                PanelOperand<float>{packed, k_size * kPanelWidth, kPanelWidth}, rows, group, k_size);
                 });
}

// a is read down its columns (row_stride 1). A block of k of either operand is copied, so that its lines are
// contiguous.
void matrix_product(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows&, int64_t row, int64_t rows,
                    int64_t p0, int64_t panels, float* packed) {
  float* copied = packed + kPackedFloats + kMatrixProductFloats;
  const float* a = m.a + row * m.a_row_stride;
  const int64_t c_stride = panels * kPanelWidth, b_stride = m.b_row_stride == 0 ? m.outputs : m.b_row_stride;
  for (int64_t k0 = 0; k0 < m.k_size || k0 == 0; k0 += kKBlock) {
    const int64_t k_size = std::min(kKBlock, m.k_size - k0);
    for (int64_t k = 0; k < k_size; ++k)
      map(
          copied + k * kCopiedRowStride, rows, [](Vec v) { return v; }, a + (k0 + k) * m.a_k_stride);
    for (int64_t p = 0; p < panels; p += kGroupPanels) {
      const int64_t group = std::min(kGroupPanels, panels - p);
      gather_panels(packed, static_cast<const float*>(b.data), b_stride, m.outputs, p0 + p, group, k0, k_size);
      matmul_block(c + p * kPanelWidth, c_stride, k0 > 0, RowOperand{copied, 1, kCopiedRowStride},
                   PanelOperand<float>{packed, k_size * kPanelWidth, kPanelWidth}, rows, group, k_size);
    }
  }
}

// x.rounded holds the rounded rows of a.
void vnni_product(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows& x, int64_t row, int64_t rows,
                  int64_t p0, int64_t panels, float*) {
  TileRows a = x.rounded;
  a.data = static_cast<const char*>(a.data) + row / 32 * a.pair_stride;
  const int64_t tiles = ceil_div(m.k_size, kVnniTile), panel_bytes = tiles * kTileBytes;
  const TilePanels operand{static_cast<const char*>(b.data) + p0 * panel_bytes, panel_bytes};
  x.bf16_product(c, panels * kPanelWidth, a, operand, rows, panels, tiles);
}

void quantized_panels_product(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows& x, int64_t row,
                              int64_t rows, int64_t p0, int64_t panels, float* unpacked) {
  x.quantized_product(c, x.quantized, b.quantized, m.k_size, row, rows, p0, panels, unpacked);
}

// ---- Routines of MatmulPlan::Finish.

// Bias: the element type of bias; void without one.
template <typename Bias>
void finish_store(const Matmul& m, int64_t row, int64_t rows, int64_t column, int64_t n, float* c, const float*,
                  int64_t c_stride) {
  for (int64_t r = row; r < row + rows; ++r, c += c_stride) {
    float* y = m.y_row(r) + column;
    const float* residual = m.residual == nullptr ? nullptr : m.residual + r * m.outputs + column;
    if constexpr (std::is_void_v<Bias>) {
      if (residual != nullptr)
        map(
            y, n, [](Vec p, Vec v) { return hn::Add(p, v); }, c, residual);
      else
        map(
            y, n, [](Vec p) { return p; }, c);
    } else {
      const Bias* bias = static_cast<const Bias*>(m.bias) + column;
      if (residual != nullptr)
        map(
            y, n, [](Vec p, Vec b, Vec v) { return hn::Add(hn::Add(p, b), v); }, c, bias, residual);
      else
        map(
            y, n, [](Vec p, Vec b) { return hn::Add(p, b); }, c, bias);
    }
  }
}

void finish_accumulate(const Matmul& m, int64_t row, int64_t rows, int64_t column, int64_t n, float* c, const float*,
                       int64_t c_stride) {
  for (int64_t r = row; r < row + rows; ++r, c += c_stride) {
    float* y = m.y_row(r) + column;
    map(
        y, n, [](Vec p, Vec sum) { return hn::Add(sum, p); }, c, y);
  }
}

template <ActivationKind kKind>
void finish_gated(const Matmul& m, int64_t row, int64_t rows, int64_t column, int64_t n, float* c, const float* c_up,
                  int64_t c_stride) {
  for (int64_t r = row; r < row + rows; ++r, c += c_stride, c_up += c_stride)
    map(
        m.y + r * m.outputs + column, n, [](Vec gate, Vec up) { return hn::Mul(activate<kKind>(gate), up); }, c, c_up);
}

template <ActivationKind kKind>
void finish_gated_rows(const Matmul& m, int64_t row, int64_t rows, int64_t column, int64_t n, float* c,
                       const float* c_up, int64_t c_stride) {
  for (int64_t r = 0; r < rows; ++r)
    map(
        c + r * c_stride, n, [](Vec gate, Vec up) { return hn::Mul(activate<kKind>(gate), up); }, c + r * c_stride,
        c_up + r * c_stride);
  round_rows<1>(m.y_rows, {.x = c, .stride = c_stride, .columns = n, .first_row = row, .first_step = column / kStep},
                row, row + rows);
}

// ---- The choice of both.

MatmulPlan::Product product_of(const MatmulTypes& types) {
  switch (types.source) {
    case Source::matrix: return matrix_product;
    case Source::quantized: return quantized_panels_product;
    case Source::decoded: return decoded_product;
    case Source::fp8: return types.is_e5m2 ? fp8_product<true> : fp8_product<false>;
    case Source::vnni: return vnni_product;
    case Source::panels: break;
  }
  return with_dtype(types.b_dtype,
                    [](auto* type) -> MatmulPlan::Product { return packed_product<ElementOf<decltype(type)>>; });
}

MatmulPlan::Finish finish_of(const MatmulTypes& types) {
  switch (types.finish) {
    case MatmulTypes::Finish::accumulate: return finish_accumulate;
    case MatmulTypes::Finish::gated:
      return with_activation(types.activation,
                             [](auto kind) -> MatmulPlan::Finish { return finish_gated<decltype(kind)::value>; });
    case MatmulTypes::Finish::gated_rows:
      return with_activation(types.activation,
                             [](auto kind) -> MatmulPlan::Finish { return finish_gated_rows<decltype(kind)::value>; });
    case MatmulTypes::Finish::store: break;
  }
  if (!types.bias) return finish_store<void>;
  return with_dtype(*types.bias,
                    [](auto* type) -> MatmulPlan::Finish { return finish_store<ElementOf<decltype(type)>>; });
}

MatmulPlan::Routines matmul_routines(const MatmulTypes& types) { return {product_of(types), finish_of(types)}; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(matmul_routines);

MatmulTypes::Source source_of(PackedPanels::Side side) {
  return PackedPanels::is_interleaved(side) ? Source::vnni : Source::panels;
}

MatmulPlan::MatmulPlan(const CpuDevice& device, const MatmulTypes& types)
    : source_(types.source),
      gated_(types.finish == MatmulTypes::Finish::gated || types.finish == MatmulTypes::Finish::gated_rows),
      routines_(EADEM_CPU_DISPATCH(matmul_routines, device.isa())(types)),
      blocks_(blocks_of(types.source)),
      tile_blocks_(blocks_),
      long_blocks_(blocks_),
      packed_floats_(packed_floats(types.source)),
      has_order_(types.has_order) {
  if (source_ == Source::quantized) quantized_ = quantized_routines(*types.layout, device.isa());
  if (source_ == Source::decoded) decode_ = decode_steps_of(types.layout->format(), device.isa());
  if (source_ == Source::vnni) {
    const bool tiles = device.isa() == Isa::amx;
    bf16_product_ = bf16_product_of(device.isa());
    blocks_ = tiles ? kTileBlocks : kDotRowBlocks;
    tile_blocks_ = tiles ? kTileBlocks : kDotBlocks;
    long_blocks_ = tiles ? kTileLongBlocks : kDotBlocks;
  }
  // Rows of quantized panels with one scale for each output are multiplied on tiles.
  if (source_ == Source::quantized && device.isa() == Isa::amx && types.layout->whole_rows())
    tile_blocks_ = long_blocks_ = kTileBlocks;
  const int64_t product_floats = std::max({floats_of(blocks_), floats_of(tile_blocks_), floats_of(long_blocks_)});
  worker_floats_ = source_ == Source::matrix ? packed_floats_ + kMatrixProductFloats + kCopiedFloats
                                             : packed_floats_ + (gated_ ? 2 : 1) * product_floats;
}

int64_t MatmulPlan::prepared_bytes(int64_t rows, int64_t k_size, bool is_rounded) const {
  switch (source_) {
    case Source::quantized:
      return quantized_rows_bytes(rows, k_size) + (is_rounded ? 0 : int8_rows_bytes(rows, k_size));
    case Source::vnni: return is_rounded ? 0 : TileRows::bytes_in_order(rows, ceil_div(k_size, kVnniTile));
    case Source::decoded: return has_order_ ? rows * k_size * static_cast<int64_t>(sizeof(float)) : 0;
    default: return 0;
  }
}

int64_t MatmulPlan::scratch_bytes(const CpuDevice& device, int64_t rows, int64_t k_size, bool is_rounded) const {
  const int64_t workers = device.pool().num_threads() * worker_floats_ * static_cast<int64_t>(sizeof(float));
  return workers + prepared_bytes(rows, k_size, is_rounded);
}

int64_t MatmulPlan::worker_bytes_each(int64_t rows, int64_t k_size) const {
  constexpr int64_t kLine = 64;
  return worker_floats_ * static_cast<int64_t>(sizeof(float)) + round_up(prepared_bytes(rows, k_size, false), kLine);
}

int64_t MatmulPlan::scratch_bytes_each(const CpuDevice& device, int64_t rows, int64_t k_size) const {
  return std::max(scratch_bytes(device, rows, k_size),
                  device.pool().num_threads() * worker_bytes_each(std::min(rows, kFewRows), k_size));
}

// Calls part(begin, end) for parts of [0, n): on the threads of `pool` or, if it is null, on this one.
template <typename Part>
static void for_parts(ThreadPool* pool, int64_t n, int64_t least, Part&& part) {
  if (pool == nullptr)
    part(int64_t{0}, n);
  else
    pool->parallel_ranges(n, least, part);
}

MatmulRows MatmulPlan::quantized_rows(ThreadPool* pool, const Matmul& m, void* memory) const {
  const QuantizedWeight& weight = m.b.quantized;
  const bool is_rounded = m.a_codes.codes != nullptr;
  void* planes = static_cast<char*>(memory) + quantized_rows_bytes(m.rows, m.k_size);
  const Int8RowPlanes codes = is_rounded ? m.a_codes : int8_rows_in(planes, m.rows, m.k_size);
  MatmulRows x;
  x.quantized = quantized_rows_in(memory, *weight.layout, codes, m.k_size);
  x.quantized_product = quantized_.product_of(m.rows);
  const auto round = weight.layout->whole_rows() ? quantized_.x.round_chunks : quantized_.x.round_steps;
  // The sums alone are an eighth of the work.
  const int64_t least = rows_per_thread(m.k_size) * (is_rounded ? 8 : 1);
  for_parts(pool, m.rows, least, [&](int64_t begin, int64_t end) {
    if (!is_rounded) round(codes, {m.a, m.a_row_stride, m.k_size, weight.order}, begin, end);
    quantized_.x.sum(x.quantized, codes, m.k_size, begin, end);
  });
  return x;
}

MatmulRows MatmulPlan::tile_rows(ThreadPool* pool, const Matmul& m, void* memory) const {
  MatmulRows x;
  x.bf16_product = bf16_product_;
  x.rounded = m.a_tiles;
  if (x.rounded.data != nullptr) return x;
  x.rounded = TileRows::in_order(memory, m.rows);
  for_parts(pool, m.rows, rows_per_thread(m.k_size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) round_to_tiles(x.rounded, r, m.a + r * m.a_row_stride, m.k_size);
  });
  return x;
}

MatmulRows MatmulPlan::ordered_rows(ThreadPool* pool, const Matmul& m, void* memory) const {
  MatmulRows x;
  x.decode = decode_;
  const int32_t* order = m.b.quantized.order;
  if (order == nullptr) return x;
  auto* ordered = static_cast<float*>(memory);
  for_parts(pool, m.rows, rows_per_thread(m.k_size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t k = 0; k < m.k_size; ++k) ordered[r * m.k_size + k] = m.a[r * m.a_row_stride + order[k]];
  });
  x.ordered = ordered;
  return x;
}

MatmulRows MatmulPlan::prepared_rows(ThreadPool* pool, const Matmul& m, void* memory) const {
  if (source_ == Source::quantized) return quantized_rows(pool, m, memory);
  if (source_ == Source::vnni) return tile_rows(pool, m, memory);
  if (source_ == Source::decoded) return ordered_rows(pool, m, memory);
  return {};
}

// Computes rows [row_begin, row_end) of panels [panel_begin, panel_end).
void MatmulPlan::run_task(const Matmul& m, const MatmulRows& x, const Blocks& blocks, int64_t row_begin,
                          int64_t row_end, int64_t panel_begin, int64_t panel_end, float* scratch) const {
  float* c = scratch + packed_floats_;
  float* c_up = c + floats_of(blocks);
  float* packed = c + (gated_ ? 2 : 1) * floats_of(blocks);
  const int64_t rows = row_end - row_begin;
  for (int64_t p0 = panel_begin; p0 < panel_end; p0 += blocks.panels) {
    const int64_t panels = std::min(blocks.panels, panel_end - p0), column = p0 * kPanelWidth;
    const auto multiply = [&](float* to, const MatmulWeight& b) {
      if (b.stored == nullptr) return routines_.product(to, m, b, x, row_begin, rows, p0, panels, scratch);
      routines_.product(to, m, b.reader->pack(packed, *b.stored, p0, panels), x, row_begin, rows, 0, panels, scratch);
    };
    multiply(c, m.b);
    if (gated_) multiply(c_up, m.b_up);
    routines_.finish(m, row_begin, rows, column, std::min(panels * kPanelWidth, m.outputs - column), c, c_up,
                     panels * kPanelWidth);
  }
}

void MatmulPlan::run_alone(const Matmul& m, void* scratch) const {
  if (m.rows == 0 || m.outputs == 0) return;
  float* floats = static_cast<float*>(scratch);
  const MatmulRows x = prepared_rows(nullptr, m, floats + worker_floats_);
  run_task(m, x, m.rows > 1 ? tile_blocks_ : blocks_, 0, m.rows, 0, ceil_div(m.outputs, kPanelWidth), floats);
}

// A weight is packed again for each block of rows.
MatmulPlan::Blocks MatmulPlan::stored_blocks() const {
  return {kTileRowBlock, tile_blocks_.unit, tile_blocks_.unit, kTileRowBlock};
}

int64_t MatmulPlan::worker_floats_stored(int64_t panel_bytes) const {
  const Blocks blocks = stored_blocks();
  return packed_floats_ + (gated_ ? 2 : 1) * floats_of(blocks) +
         blocks.panels * panel_bytes / static_cast<int64_t>(sizeof(float));
}

int64_t MatmulPlan::scratch_bytes_stored(const CpuDevice& device, int64_t rows, int64_t k_size, int64_t panel_bytes,
                                         bool is_rounded) const {
  return device.pool().num_threads() * worker_floats_stored(panel_bytes) * static_cast<int64_t>(sizeof(float)) +
         prepared_bytes(rows, k_size, is_rounded);
}

void MatmulPlan::run_stored(CpuDevice& device, const Matmul& m, void* scratch) const {
  ThreadPool& pool = device.pool();
  const int64_t worker_floats = worker_floats_stored(m.b.reader->panel_bytes(m.k_size));
  auto* floats = static_cast<float*>(scratch);
  const MatmulRows x = prepared_rows(&pool, m, floats + pool.num_threads() * worker_floats);
  const Blocks blocks = stored_blocks();
  const int64_t panels = ceil_div(m.outputs, kPanelWidth), units = ceil_div(panels, blocks.unit);
  const int64_t tasks = std::min<int64_t>(4 * pool.active_threads(), units);
  for (int64_t row = 0; row < m.rows; row += blocks.rows)
    pool.parallel_shares(tasks, [&](int64_t index, int worker) {
      run_task(m, x, blocks, row, std::min(m.rows, row + blocks.rows), units * index / tasks * blocks.unit,
               std::min(panels, units * (index + 1) / tasks * blocks.unit), floats + worker * worker_floats);
    });
}

void MatmulPlan::run(CpuDevice& device, const Matmul& m, void* scratch) const {
  if (m.rows == 0 || m.outputs == 0) return;
  if (m.b.stored != nullptr) return run_stored(device, m, scratch);
  ThreadPool& pool = device.pool();
  const Blocks& blocks = m.rows == 1 ? blocks_ : m.k_size > kTileLongRow ? long_blocks_ : tile_blocks_;

  // 1. Prepare the data that all tasks share.
  const MatmulRows x = prepared_rows(&pool, m, static_cast<float*>(scratch) + pool.num_threads() * worker_floats_);

  const int64_t panels = ceil_div(m.outputs, kPanelWidth), units = ceil_div(panels, blocks.unit);
  const auto task = [&](int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end, int worker) {
    run_task(m, x, blocks, row_begin, row_end, unit_begin * blocks.unit, std::min(panels, unit_end * blocks.unit),
             static_cast<float*>(scratch) + worker * worker_floats_);
  };
  // A product below about 20 us is not worth waking anyone.
  constexpr double kShortest = 1e5;
  const double multiplications = static_cast<double>(m.rows) * static_cast<double>(m.outputs) * m.k_size;

  // 2. With few rows, reading weights takes the time: each worker begins with the weights that it packed
  // (ParameterStore).
  if (m.rows <= kFewRows) {
    const int64_t threads = pool.active_threads(),
                  wanted = multiplications < kShortest || threads == 1 ? 1 : 4 * threads;
    const int64_t tasks = std::min(wanted, units);
    pool.parallel_shares(tasks, [&](int64_t index, int worker) {
      task(0, m.rows, units * index / tasks, units * (index + 1) / tasks, worker);
    });
    return;
  }

  // 3. With many rows, rows are divided into blocks of equal size, each block into units of panels, and each of those
  // into units of rows. Neighbouring pieces make a task, because they read the same rows or panels.
  const int64_t row_blocks = ceil_div(m.rows, blocks.rows);
  // A multiple of the rows of every tile; quantized weights have tiles of 12, of 6 and, on AMX, of 16.
  const int64_t multiple = blocks.rows == kTileRowBlock ? 32 : source_ == Source::quantized ? 48 : 12;
  const int64_t block_rows =
      row_blocks == 1 ? m.rows : std::min(blocks.rows, round_up(ceil_div(m.rows, row_blocks), multiple));
  const int64_t row_units = ceil_div(block_rows, blocks.row_unit), block_pieces = units * row_units;
  const int64_t pieces = row_blocks * block_pieces;
  const auto shortest = static_cast<int64_t>(kShortest * static_cast<double>(pieces) / multiplications);
  pool.parallel_ranges(pieces, shortest, [&](int64_t begin, int64_t end, int worker) {
    while (begin < end) {
      const int64_t block = begin / block_pieces, unit = begin % block_pieces / row_units, first = begin % row_units;
      const int64_t row_begin = block * block_rows, row_end = std::min(m.rows, row_begin + block_rows);
      const int64_t some = std::min(end, (block + 1) * block_pieces) - begin;
      if (first == 0 && some >= row_units) {
        task(row_begin, row_end, unit, unit + some / row_units, worker);
        begin += some / row_units * row_units;
      } else {
        const int64_t last = std::min(row_units, first + some);
        task(std::min(row_end, row_begin + first * blocks.row_unit),
             std::min(row_end, row_begin + last * blocks.row_unit), unit, unit + 1, worker);
        begin += last - first;
      }
    }
  });
}

namespace {

// The rows of m that a group has, as a product.
Matmul product_of_group(const Matmul& m, const MatmulGroup& group) {
  Matmul own = m;
  own.rows = group.rows;
  own.a = m.a == nullptr ? nullptr : m.a + group.row * m.a_row_stride;
  own.b = group.b;
  own.bias = group.bias;
  own.y = m.y + group.row * m.outputs;
  return own;
}

}  // namespace

void MatmulPlan::run_units(const Matmul& m, const MatmulRows& x, const MatmulGroup& group, int64_t begin, int64_t end,
                           float* scratch) const {
  Matmul own = m;
  own.b = group.b;
  own.bias = group.bias;
  MatmulRows rows = x;
  rows.quantized_product = quantized_.product_of(group.rows);
  const int64_t last = group.row + group.rows, panels = ceil_div(m.outputs, kPanelWidth);
  for (int64_t row = group.row; row < last; row += tile_blocks_.rows)
    run_task(own, rows, tile_blocks_, row, std::min(last, row + tile_blocks_.rows), begin * tile_blocks_.unit,
             std::min(panels, end * tile_blocks_.unit), scratch);
}

void MatmulPlan::run_groups(CpuDevice& device, const Matmul& m, std::span<const MatmulGroup> groups,
                            void* scratch) const {
  if (groups.empty() || m.outputs == 0) return;
  // Tiles take rows from a multiple of their height on, and a weight whose columns have an order of their own wants the
  // rows in that order: each group is a product by itself.
  if (source_ == Source::vnni || has_order_) {
    for (const MatmulGroup& group : groups) run(device, product_of_group(m, group), scratch);
    return;
  }
  // 1. Prepare the rows of all groups at once.
  ThreadPool& pool = device.pool();
  Matmul all = m;
  all.b = groups.front().b;
  const MatmulRows x = prepared_rows(&pool, all, static_cast<float*>(scratch) + pool.num_threads() * worker_floats_);

  // 2. The groups stand side by side: all of them are divided at once, and each into units of panels. A unit of a group
  // with few rows takes as long as reading its weights, one with many rows longer; ranges become shorter to the end.
  const int64_t units = ceil_div(ceil_div(m.outputs, kPanelWidth), tile_blocks_.unit);
  pool.parallel_ranges(static_cast<int64_t>(groups.size()) * units, 1, [&](int64_t begin, int64_t end, int worker) {
    while (begin < end) {
      const int64_t group = begin / units, first = begin % units, some = std::min(end - begin, units - first);
      run_units(m, x, groups[static_cast<size_t>(group)], first, first + some,
                static_cast<float*>(scratch) + worker * worker_floats_);
      begin += some;
    }
  });
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
