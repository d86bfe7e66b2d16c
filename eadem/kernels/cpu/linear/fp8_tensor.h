// SPDX-License-Identifier: Apache-2.0
//
// linear whose weight, x and gradient of y are Fp8TensorEncoding's, in all passes (training in 8-bit floats with a
// scale for each tensor).
#pragma once

#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cpu {

KernelList fp8_tensor_kernels();

}  // namespace eadem::kernels::cpu
