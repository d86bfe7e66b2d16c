// SPDX-License-Identifier: Apache-2.0
//
// The parallel matrix product behind linear, its fusions and its gradients:
//
//   product[r, n] = sum_k a[r, k] * b[k, n],   then `finish` writes y[r, n]
//
// Accumulates in f32, each output as one chain over k in order (matmul-inl.h). The chain goes over steps of k for
// quantized weights (quantized_matmul.h) and for products of bf16 (amx.h, bf16_dots.h). Results therefore do not depend
// on the number of rows, on blocking or on threads.
//
// A MatmulPlan is made once for the types of a product; its `run` computes any number of products of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/bf16_dots.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_decode.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_matmul.h"
#include "eadem/kernels/elementwise.h"

namespace eadem::kernels::cpu {

// The properties of a product that decide which routine computes it.
struct MatmulTypes {
  // b: packed panels [ceil(outputs / 16), k_size, 16] of b_dtype; an f32 matrix [k_size, outputs] stored by rows (then
  // a_row_stride is 1); quantized panels (then a_k_stride is 1, and a is rounded to Int8Rows); 8-bit floats, which are
  // decoded to f32 a block at a time; or VNNI-interleaved panels, for products of bf16 (then a_k_stride is 1, and a is
  // rounded to Bf16TileRows). Quantized panels can also be decoded as 8-bit floats are, for an a that is not rounded.
  enum class Source : uint8_t { panels, matrix, quantized, decoded, fp8, vnni };
  Source source = Source::panels;
  DType b_dtype = DType::f32;               // panels
  const QuantizedLayout* layout = nullptr;  // quantized and decoded
  bool has_order = false;                   // likewise: the weight's columns have an order of their own
  bool is_e5m2 = false;                     // fp8; else e4m3

  enum class Finish : uint8_t {
    store,       // y = product + bias + residual, in this order
    accumulate,  // y += product
    gated,       // y = f(product) * product_up
    gated_rows,  // likewise, rounded to Int8Rows with a scale for each step
  };
  Finish finish = Finish::store;
  std::optional<DType> bias;  // store: its dtype; nothing: there is none
  ActivationKind activation = ActivationKind::silu;
};

// The planes of a weight in Fp8Panels.
struct Fp8Weight {
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
  int64_t block_columns = 0;  // columns that share a scale; 0: all
};

class WeightReader;

// The memory of b, in the one of its forms that MatmulTypes::source names; or, if `stored` is given, as its file stores
// it: `reader` then packs a few panels at a time (weight_reader.h).
struct MatmulWeight {
  const void* data = nullptr;  // panels, matrix, vnni
  QuantizedWeight quantized;
  Fp8Weight fp8;
  const TensorView* stored = nullptr;
  const WeightReader* reader = nullptr;
};

// One product.
struct Matmul {
  int64_t rows = 0;
  int64_t k_size = 0;
  int64_t outputs = 0;

  // a[r, k] = a[r * a_row_stride + k * a_k_stride]
  const float* a = nullptr;
  int64_t a_row_stride = 0;
  int64_t a_k_stride = 1;
  // For quantized and for VNNI-interleaved panels: a as it was rounded once for several products. Then the pointer `a`
  // is null.
  Int8RowPlanes a_codes;
  TileRows a_tiles{};

  MatmulWeight b;
  int64_t b_row_stride = 0;  // of a matrix; 0: outputs
  MatmulWeight b_up;         // Finish::gated: the second factor, of the same types

  float* y = nullptr;               // [rows, outputs]; may be `residual`
  int64_t y_row_stride = 0;         // store and accumulate; 0: outputs
  Int8RowPlanes y_rows;             // Finish::gated_rows: instead of y. `outputs` are whole steps
  const void* bias = nullptr;       // [outputs] of MatmulTypes::bias
  const float* residual = nullptr;  // [rows, outputs], contiguous; null: none

  float* y_row(int64_t r) const { return y + r * (y_row_stride == 0 ? outputs : y_row_stride); }
};

// Neighbouring rows of a product that meet a weight of their own.
struct MatmulGroup {
  int64_t row = 0;  // the first
  int64_t rows = 0;
  MatmulWeight b;
  const void* bias = nullptr;
};

// A weight packed by PackedPanels for `side`: how products read it.
MatmulTypes::Source source_of(PackedPanels::Side side);

// The operand a in the layout that the source of b needs.
struct MatmulRows {
  QuantizedRows quantized;
  QuantizedProduct quantized_product = nullptr;
  TileRows rounded;
  Bf16Product bf16_product = nullptr;
  DecodeSteps decode = nullptr;
  const float* ordered = nullptr;  // decoded: a in the order of the weight's columns, contiguous
};

class MatmulPlan {
 public:
  MatmulPlan(const CpuDevice& device, const MatmulTypes& types);

  // Bytes of scratch for products of up to `rows` rows of `k_size` values; less if a always arrives rounded.
  int64_t scratch_bytes(const CpuDevice& device, int64_t rows, int64_t k_size, bool is_rounded = false) const;
  // Likewise, if weights may arrive as they are stored. `panel_bytes`: WeightReader::panel_bytes.
  int64_t scratch_bytes_stored(const CpuDevice& device, int64_t rows, int64_t k_size, int64_t panel_bytes,
                               bool is_rounded) const;
  void run(CpuDevice& device, const Matmul& product, void* scratch) const;
  // Computes the groups' rows of `product`, each with the weight of its group; product.b and product.bias are not
  // read. A row has the bits that `run` gives it.
  void run_groups(CpuDevice& device, const Matmul& product, std::span<const MatmulGroup> groups, void* scratch) const;

  // `count` products of equal sizes: product_of(i) is one of them. Those of few rows are computed side by side, each by
  // one thread.
  int64_t scratch_bytes_each(const CpuDevice& device, int64_t rows, int64_t k_size) const;
  template <typename ProductOf>
  void run_each(CpuDevice& device, int64_t count, ProductOf&& product_of, void* scratch) const {
    if (count == 0) return;
    const Matmul first = product_of(int64_t{0});
    if (first.rows > kFewRows) {
      for (int64_t i = 0; i < count; ++i) run(device, product_of(i), scratch);
      return;
    }
    const int64_t bytes = worker_bytes_each(first.rows, first.k_size);
    device.pool().parallel_shares(
        count, [&](int64_t i, int worker) { run_alone(product_of(i), static_cast<char*>(scratch) + worker * bytes); });
  }

  // c [rows, panels * 16] = a b for rows [row, row + rows) and panels [panel, panel + panels).
  using Product = void (*)(float* c, const Matmul& m, const MatmulWeight& b, const MatmulRows& x, int64_t row,
                           int64_t rows, int64_t panel, int64_t panels, float* scratch);
  // Writes columns [column, column + n) of `rows` rows of y from their products, whose rows are c_stride apart and
  // which it may change.
  using Finish = void (*)(const Matmul& m, int64_t row, int64_t rows, int64_t column, int64_t n, float* c,
                          const float* c_up, int64_t c_stride);
  struct Routines {
    Product product;
    Finish finish;
  };
  // A block of rows and panels is multiplied together. Tasks are divided at multiples of `unit` panels, and of whole
  // blocks or `row_unit` rows.
  struct Blocks {
    int64_t rows, panels, unit, row_unit;
  };

 private:
  // Up to this many rows, a product takes as long as reading its weights.
  static constexpr int64_t kFewRows = 32;

  // The rows of m that all tasks read. What must be made of them is written to `memory`, by the threads of `pool` or,
  // if it is null, by this one.
  MatmulRows quantized_rows(ThreadPool* pool, const Matmul& m, void* memory) const;
  MatmulRows tile_rows(ThreadPool* pool, const Matmul& m, void* memory) const;
  MatmulRows ordered_rows(ThreadPool* pool, const Matmul& m, void* memory) const;
  MatmulRows prepared_rows(ThreadPool* pool, const Matmul& m, void* memory) const;
  int64_t prepared_bytes(int64_t rows, int64_t k_size, bool is_rounded) const;
  int64_t worker_bytes_each(int64_t rows, int64_t k_size) const;
  // A product of few rows, within a task.
  void run_alone(const Matmul& product, void* scratch) const;
  // Multiplies units [begin, end) of a group, whose rows have been prepared.
  void run_units(const Matmul& m, const MatmulRows& x, const MatmulGroup& group, int64_t begin, int64_t end,
                 float* scratch) const;
  // Multiplies by weights as they are stored: each panel is packed to scratch once for all rows.
  void run_stored(CpuDevice& device, const Matmul& m, void* scratch) const;
  Blocks stored_blocks() const;
  int64_t worker_floats_stored(int64_t panel_bytes) const;
  void run_task(const Matmul& m, const MatmulRows& x, const Blocks& blocks, int64_t row_begin, int64_t row_end,
                int64_t panel_begin, int64_t panel_end, float* scratch) const;

  MatmulTypes::Source source_;
  bool gated_;
  Routines routines_;
  Bf16Product bf16_product_ = nullptr;
  // How a product is divided into blocks: with one row, with several (on tiles or by bf16 products), and with several
  // that are long.
  Blocks blocks_, tile_blocks_, long_blocks_;
  int64_t packed_floats_, worker_floats_;
  bool has_order_;
  QuantizedRoutines quantized_{};
  DecodeSteps decode_ = nullptr;
};

}  // namespace eadem::kernels::cpu
