// SPDX-License-Identifier: Apache-2.0
//
// Between host tensors and plain doubles.
#pragma once

#include "eadem/core/tensor.h"
#include "eadem/kernels/kernel.h"

namespace eadem::kernels::reference {

// Every element of a host tensor, plain and contiguous or encoded, widened. An undefined view gives an empty RefTensor.
RefTensor widen(const TensorView& host);

// A host tensor of `dtype`, each value rounded to f32 and then to the dtype; integers are exact.
Tensor narrow(const RefTensor& values, DType dtype);

}  // namespace eadem::kernels::reference
