// SPDX-License-Identifier: Apache-2.0
//
// Operands of products of bf16 (amx.h, bf16_dots.h), made of rows of f32: values are rounded to nearest even, subnormal
// ones to zero. For Isa::avx512_bf16 and Isa::amx. Each function writes one tile of kTileBytes from rows that begin
// `stride` floats apart; what is missing of its 32 values of k, or of its 16 rows or outputs, is zero.
// round_to_tiles (amx.h) makes rows of a whose k are columns.
#pragma once

#include <cstdint>

#include "eadem/kernels/cpu/linear/amx.h"

namespace eadem::kernels::cpu {

// A tile of a whose k are rows: `m` columns become its rows.
void pack_a_of_columns(void* tile, const float* rows, int64_t stride, int64_t k, int64_t m);
// A tile of b whose k are rows: `n` columns are its outputs.
void pack_b_of_columns(void* tile, const float* rows, int64_t stride, int64_t k, int64_t n);
// A tile of b whose k are columns: `n` rows are its outputs.
void pack_b_of_rows(void* tile, const float* rows, int64_t stride, int64_t n, int64_t k);

}  // namespace eadem::kernels::cpu
