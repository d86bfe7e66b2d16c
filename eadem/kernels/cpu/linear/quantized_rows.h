// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as 8-bit codes with f32 scales: the operand of products with quantized weights (quantized_matmul.h).
#pragma once

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/quantized_panels.h"

namespace eadem::kernels::cpu {

// Quantized rows, stored in the order in which products read them: chunks of kChunkSteps steps, and in each chunk all
// rows.
struct QuantizedRows {
  int64_t rows;
  const QuantizedLayout* layout;
  const int32_t* order;  // the order of the weight's columns, or null; set by the caller
  int8_t* codes;         // [chunks, rows, kChunkSteps, kStep]: x ~ scale * code
  float* scales;         // [chunks, rows, kChunkSteps]
  // [chunks, rows, kChunkSteps, dots()]: the start value of a dot product with weight bytes that are zero() above their
  // level.
  int32_t* starts;
  float* sums;  // [chunks, rows, kChunkSteps]: sums of the codes of a step, for mins
  // [chunks, rows, kChunkSteps], folded layouts only. With mins: the sums of both groups as two i16. Without mins: the
  // sums times the weight's zero.
  int32_t* pairs;
  // With one scale for each output, each chunk has one scale and one start, stored at its first step, and `sums` holds
  // one total for each row [rows].

  int64_t dots() const { return layout->folded ? 1 : layout->groups(); }  // of a step
  // Levels times sub-scales of q3_k lie in -124 … 128.
  int32_t zero() const { return layout->folded && !layout->has_min ? 124 : layout->zero; }

  int64_t step(int64_t r, int64_t s) const { return (s / kChunkSteps * rows + r) * kChunkSteps + s % kChunkSteps; }
};

// The bytes that `rows` quantized rows take for products with any layout, and the rows laid out in such memory (64-byte
// aligned) for `layout`.
int64_t quantized_rows_bytes(int64_t rows, int64_t k_size);
QuantizedRows quantized_rows_in(void* base, const QuantizedLayout& layout, int64_t rows, int64_t k_size);

// Quantizes rows [begin, end) of x [q.rows, k_size].
using QuantizeRows = void (*)(const QuantizedRows& q, const float* x, int64_t x_stride, int64_t k_size, int64_t begin,
                              int64_t end);
QuantizeRows quantize_rows_on(Isa isa);

// Quantizes x [q.rows, k_size] with the device's threads.
void quantize_rows(CpuDevice& device, QuantizeRows quantize, const QuantizedRows& q, const float* x, int64_t x_stride,
                   int64_t k_size);

}  // namespace eadem::kernels::cpu
