// SPDX-License-Identifier: Apache-2.0
//
// How products read the matrices of heads, one for each, that a parameter [heads, out, in] stacks.
#pragma once

#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/cpu/weight_reader.h"

namespace eadem::kernels::cpu {

// The packing in which products read the matrix of a head, or null if none reads it.
inline const Encoding* head_matrix(const KernelRequest& r, const TensorType& weight, MatmulInput x) {
  const Encoding* stored = matrix_encoding(weight.encoding);
  const Encoding* panels = PackedPanels::of_forward(weight.dtype, cpu_device(r).isa(), x);
  if (stored == nullptr || stored == panels) return panels;
  if (const Encoding* quantized = quantized_packing_of(stored)) return quantized;
  return Fp8Panels::of(stored);
}

}  // namespace eadem::kernels::cpu
