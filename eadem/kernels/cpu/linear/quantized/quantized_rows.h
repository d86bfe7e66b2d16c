// SPDX-License-Identifier: Apache-2.0
//
// Rounds activations to Int8Rows, and makes of them the operand of products with one quantized weight
// (quantized_matmul.h).
#pragma once

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/int8_rows.h"

namespace eadem::kernels::cpu {

// Rows of x as products with weights of one layout read them, in chunks of kChunkSteps steps, in each chunk all rows.
struct QuantizedRows {
  int64_t rows;
  const QuantizedLayout* layout;
  const int8_t* codes;  // [chunks, rows, kChunkSteps, kStep]: x ~ scale * code
  const float* scales;  // [chunks, rows, kChunkSteps]
  // What follows depends on the layout and is exact: sums of codes as that layout's products need them.
  // [chunks, rows, kChunkSteps, dots()]: the start value of a dot product with weight bytes that are zero() above their
  // level. An instruction set whose products take bytes for signed numbers has starts of its own.
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

// The bytes of what a product with any layout adds to `rows` rows, and the operand with that in such memory (64-byte
// aligned).
int64_t quantized_rows_bytes(int64_t rows, int64_t k_size);
QuantizedRows quantized_rows_in(void* memory, const QuantizedLayout& layout, const Int8RowPlanes& x, int64_t k_size);

// The rows that are rounded: row r of the result begins at x + (r - first_row) * stride. With `order`, column i of the
// result is column order[i] of x.
struct RoundedSource {
  const float* x;
  int64_t stride;
  int64_t columns;
  const int32_t* order = nullptr;
  // A block of the rows and columns of the result. Columns are whole steps.
  int64_t first_row = 0, first_step = 0;
};

struct RowRoutines {
  // Rounds rows [begin, end) with a scale for each step, or for each chunk.
  void (*round_steps)(const Int8RowPlanes& q, const RoundedSource& source, int64_t begin, int64_t end);
  void (*round_chunks)(const Int8RowPlanes& q, const RoundedSource& source, int64_t begin, int64_t end);
  // Makes starts, sums and pairs of rows [begin, end).
  void (*sum)(const QuantizedRows& q, const Int8RowPlanes& x, int64_t k_size, int64_t begin, int64_t end);
};
RowRoutines row_routines(Isa isa);

// Rows of `columns` values that one thread prepares: a few microseconds of work do not justify waking another.
constexpr int64_t rows_per_thread(int64_t columns) {
  return columns >= 16384 ? 1 : 16384 / (columns > 0 ? columns : 1);
}

}  // namespace eadem::kernels::cpu
