// SPDX-License-Identifier: Apache-2.0
//
// CPU instruction sets that kernels are compiled for. Chosen once, when a CpuDevice is made.
#pragma once

#include <string_view>
#include <vector>

namespace eadem {

// avx512_vnni is avx512 with the 8-bit dot products that quantized weights use; avx512_bf16 is avx512_vnni with dot
// products of bf16; amx is avx512_bf16 with tiles of 8-bit integers and of bf16, which the system must grant to the
// process. neon_dotprod is neon with 8-bit dot products, which ARMv8.2 may have.
enum class Isa { scalar, sse4, avx2, avx512, avx512_vnni, avx512_bf16, amx, neon, neon_dotprod };

std::string_view isa_name(Isa isa);

// Lanes of f32 in a vector.
int isa_lanes(Isa isa);

// Whether there are 8-bit dot products (vpdpbusd, sdot).
constexpr bool has_byte_dots(Isa isa) {
  return isa == Isa::avx512_vnni || isa == Isa::avx512_bf16 || isa == Isa::amx || isa == Isa::neon_dotprod;
}

// Whether there are products of bf16, by vectors (vdpbf16ps) or tiles. What they multiply is rounded to bf16.
constexpr bool has_bf16_products(Isa isa) { return isa == Isa::avx512_bf16 || isa == Isa::amx; }

// Every instruction set that this machine can run and this build contains, best first: a device takes the first unless
// its options name one. Never empty. avx512_bf16 stands after avx512_vnni on Intel's processors, where its dot products
// are slower than products of f32.
std::vector<Isa> available_isas();

// The available instruction set named `name`. Throws InvalidArgument (unknown name) or Unsupported (the
// machine lacks it), listing what there is.
Isa isa_from_name(std::string_view name);

}  // namespace eadem
