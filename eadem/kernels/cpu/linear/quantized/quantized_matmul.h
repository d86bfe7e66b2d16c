// SPDX-License-Identifier: Apache-2.0
//
// Products with weights in QuantizedPanels. matmul.h drives them.
//
// A row of x is rounded by itself: 8-bit codes with an f32 scale per step of 32 values (Int8Rows). Then
//
//   c[r, n] = sum over the steps s in order:  acc = fma(x_scale[r, s], f, acc),
//   f = sum over the groups g of s:  float(dot of the group's codes, exact in i32) * w_scale[g, n],
//       then, with mins (one group):  - float(x_sum[r]) * w_min[n]
//
// and for a folded layout, whose sub-scales are multiplied in integers too,
//
//   f = float(sum over g: dot * sub_scale[g, n]) * super_scale[n] - float(sum over g: x_sum[r, g] * sub_min[g, n]) *
//       super_min[n]
//
// Where an output has one scale (QuantizedLayout::whole_rows), x has one scale for each chunk of 256 values, and
//
//   c[r, n] = w_scale[n] * acc, and with mins  - total[r] * w_min[n],
//   acc = chain over the chunks:  fma(x_scale[r, chunk], float(dot of the chunk, exact in i32), acc)
//   total = chain over the chunks:  fma(x_scale[r, chunk], float(x_sum[r, chunk]), total)
//
// Integers are exact and the chain over the steps is the only order there is, so a result depends neither on how many
// rows there are, nor on blocking, nor (where there is FMA) on the instruction set.
#pragma once

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_rows.h"

namespace eadem::kernels::cpu {

// The planes of a weight in QuantizedPanels.
struct QuantizedWeight {
  const QuantizedLayout* layout = nullptr;
  const uint8_t* quants = nullptr;
  const uint8_t* scales = nullptr;
  const f16_t* super_scales = nullptr;
  // The planes that only GroupPanels have; null for other weights.
  const uint8_t* zeros = nullptr;
  const int32_t* order = nullptr;
};

// Computes c [rows, panels * 16] = x w for rows [r0, r0 + rows) and panels [p0, p0 + panels). `scratch` has
// kChunkScratchBytes a panel, and there are at most kMaxGroupPanels panels. Layouts with one scale for each output take
// any number of panels and need only kChunkSteps * kStepBytes a panel.
using QuantizedProduct = void (*)(float* c, const QuantizedRows& x, const QuantizedWeight& w, int64_t k_size,
                                  int64_t r0, int64_t rows, int64_t p0, int64_t panels, float* scratch);

// The routines for weights of one layout on one instruction set. Up to `most_few` rows have a product of their own.
struct QuantizedRoutines {
  RowRoutines x;
  QuantizedProduct few_rows;
  QuantizedProduct rows;
  int64_t most_few = 1;

  QuantizedProduct product_of(int64_t count) const { return count <= most_few ? few_rows : rows; }
};
QuantizedRoutines quantized_routines(const QuantizedLayout& layout, Isa isa);

// The products that quantized_routines chooses from: for layouts with one scale for each output, for few rows of other
// layouts, and for any number of rows.
QuantizedProduct row_scale_product(const QuantizedLayout& layout, Isa isa);
QuantizedProduct few_rows_product(const QuantizedFormat& format, Isa isa);
int64_t most_few_rows(Isa isa);
QuantizedProduct block_product(const QuantizedFormat& format, Isa isa);

}  // namespace eadem::kernels::cpu
