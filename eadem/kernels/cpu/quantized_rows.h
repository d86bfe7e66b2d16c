// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as 8-bit codes with f32 scales: what products with quantized weights multiply (quantized_matmul.h).
#pragma once

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/quantized_panels.h"

namespace eadem::kernels::cpu {

// In the order in which products read them: chunks of kChunkSteps steps, in each all rows.
struct QuantizedRows {
  int64_t rows;
  const QuantizedLayout* layout;
  const int32_t* order;  // of the weight's columns, or null; set by the caller
  int8_t* codes;         // [chunks, rows, kChunkSteps, kStep]: x ~ scale * code
  float* scales;         // [chunks, rows, kChunkSteps]
  // [chunks, rows, kChunkSteps, dots()]: where a dot product with bytes above their level by zero() starts.
  int32_t* starts;
  float* sums;  // [chunks, rows, kChunkSteps]: of a step's codes, for mins
  // [chunks, rows, kChunkSteps], folded layouts: the sums of both groups as two i16, for mins; without, times the
  // weight's zero.
  int32_t* pairs;
  // With one scale for each output, scales and starts are those of chunks, at their first step, and sums the totals of
  // rows [rows].

  int64_t dots() const { return layout->folded ? 1 : layout->groups(); }  // of a step
  // Levels times sub-scales of q3_k are -124 … 128.
  int32_t zero() const { return layout->folded && !layout->has_min ? 124 : layout->zero; }

  int64_t step(int64_t r, int64_t s) const { return (s / kChunkSteps * rows + r) * kChunkSteps + s % kChunkSteps; }
};

// Bytes for `rows` quantized rows, and the rows laid out in them (64-byte aligned), for products with `layout`.
int64_t quantized_rows_bytes(int64_t rows, int64_t k_size);
QuantizedRows quantized_rows_in(void* base, const QuantizedLayout& layout, int64_t rows, int64_t k_size);

// Quantizes x [q.rows, k_size] with the device's threads.
void quantize_rows(CpuDevice& device, const QuantizedRows& q, const float* x, int64_t x_stride, int64_t k_size);

}  // namespace eadem::kernels::cpu
