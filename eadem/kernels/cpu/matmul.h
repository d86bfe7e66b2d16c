// SPDX-License-Identifier: Apache-2.0
//
// The parallel matrix product behind linear, its fusions and its gradients:
//
//   product[r, n] = sum_k a[r, k] * b[k, n],   then `finish` writes y[r, n]
//
// Accumulates in f32, each output as one chain over k in order (matmul-inl.h). The chain goes over steps of k for
// quantized weights (quantized_matmul.h) and over tiles of k on AMX (tiles.h). Results therefore do not depend on the
// number of rows, on blocking or on threads.
#pragma once

#include <cstdint>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/quantized_matmul.h"
#include "eadem/kernels/elementwise.h"

namespace eadem::kernels::cpu {

// The planes of a weight in Fp8Panels.
struct Fp8Weight {
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
  int64_t block_columns = 0;  // columns that share a scale; 0: all
  bool is_e5m2 = false;
};

struct Matmul {
  int64_t rows = 0;
  int64_t k_size = 0;
  int64_t outputs = 0;

  // a[r, k] = a[r * a_row_stride + k * a_k_stride]
  const float* a = nullptr;
  int64_t a_row_stride = 0;
  int64_t a_k_stride = 1;

  // b: packed panels [ceil(outputs / 16), k_size, 16] of b_dtype; an f32 matrix [k_size, outputs] stored by rows (then
  // a_row_stride is 1); quantized panels (then a_k_stride is 1, and a is quantized row by row); 8-bit floats, which are
  // decoded to f32 a block at a time; or panels in pairs, for tiles (then a_k_stride is 1, and a is rounded to bf16).
  enum class Source : uint8_t { panels, matrix, quantized, fp8, pairs };
  Source b_source = Source::panels;
  const void* b = nullptr;
  const void* b_up = nullptr;  // Finish::gated only, panels and pairs: the second factor
  DType b_dtype = DType::f32;
  QuantizedWeight quantized, quantized_up;  // both have one layout
  Fp8Weight fp8, fp8_up;

  enum class Finish : uint8_t {
    store,       // y = product + bias + residual, in this order; bias and residual may be null
    accumulate,  // y += product
    gated,       // y = f(product) * product_up
  };
  Finish finish = Finish::store;
  float* y = nullptr;          // [rows, outputs], contiguous; may be `residual`
  const void* bias = nullptr;  // [outputs]
  DType bias_dtype = DType::f32;
  const float* residual = nullptr;  // [rows, outputs], contiguous
  ActivationKind activation = ActivationKind::silu;
};

// Returns the source that reads weights packed by PackedPanels for `side`. set_panels sets the source and the data in
// m.
Matmul::Source source_of(PackedPanels::Side side);
void set_panels(Matmul& m, const TensorView& weight);

// Bytes of scratch that `matmul` needs on `device` for any product with b from `source`. For quantized b, or b in
// pairs, products have up to `rows` rows of `k_size`.
int64_t matmul_scratch_bytes(const CpuDevice& device, Matmul::Source source, int64_t rows = 0, int64_t k_size = 0);

void matmul(CpuDevice& device, const Matmul& product, void* scratch);

}  // namespace eadem::kernels::cpu
