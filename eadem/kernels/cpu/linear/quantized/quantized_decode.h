// SPDX-License-Identifier: Apache-2.0
//
// Decodes weights in QuantizedPanels or GroupPanels to f32, for products that do not round their activations. Values
// have the bits of Encoding::decode_row.
#pragma once

#include "eadem/core/machine/isa.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_matmul.h"

namespace eadem::kernels::cpu {

// Writes steps [s0, s0 + steps) of panel p, of a weight with `all_steps` steps, to `to` [steps * 32, 16].
using DecodeSteps = void (*)(float* to, const QuantizedWeight& w, int64_t all_steps, int64_t p, int64_t s0,
                             int64_t steps);
DecodeSteps decode_steps_of(const QuantizedFormat& format, Isa isa);

}  // namespace eadem::kernels::cpu
