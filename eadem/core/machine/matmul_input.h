// SPDX-License-Identifier: Apache-2.0
//
// MatmulInput: the narrowest type to which matrix products may round their activations. A product rounds no further
// than it gains by: on the CPU, quantized weights multiply int8 rows, bf16 weights multiply bf16 with AMX, and
// everything else multiplies activations as they are; on CUDA, where int8 is allowed, 8-bit floats multiply rows of
// fp8_e4m3. f32 rounds nothing anywhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace eadem {

enum class MatmulInput : uint8_t { f32, bf16, int8 };

std::string_view matmul_input_name(MatmulInput input);
MatmulInput matmul_input_from_name(std::string_view name);  // throws InvalidArgument

// " matmul_input=f32", for the attributes of ops; empty for int8, which restricts nothing.
std::string matmul_input_text(MatmulInput input);

// Whether products that are allowed `limit` may round to `type`.
constexpr bool may_round_to(MatmulInput type, MatmulInput limit) { return type <= limit; }

}  // namespace eadem
