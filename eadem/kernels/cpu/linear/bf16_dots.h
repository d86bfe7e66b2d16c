// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16 by dot products of pairs (vdpbf16ps), for Isa::avx512_bf16. The operands are those of tiles (amx.h).
//
// c[r, n] is one chain over the pairs of k, from zero: c = fma(a0, b0, fma(a1, b1, c)), for a pair's first values a0,
// b0 and second values a1, b1. Every fma rounds to nearest even, and subnormal numbers count as zero (Intel SDM,
// VDPBF16PS). These are other bits than those of tiles, whose products add first and second values in chains of their
// own: with this instruction that would take one for each half of a pair, no faster than f32.
#pragma once

#include <cstdint>

#include "eadem/core/machine/isa.h"
#include "eadem/kernels/cpu/linear/amx.h"

namespace eadem::kernels::cpu {

// Computes c [rows, panels * 16] with row stride c_stride, for any number of rows and panels.
void bf16_dots(float* c, int64_t c_stride, const TileRows& a, const TilePanels& b, int64_t rows, int64_t panels,
               int64_t tiles);

// The product of an instruction set that has one: bf16_tiles or bf16_dots.
using Bf16Product = decltype(&bf16_dots);
constexpr Bf16Product bf16_product_of(Isa isa) { return isa == Isa::amx ? bf16_tiles : bf16_dots; }

}  // namespace eadem::kernels::cpu
