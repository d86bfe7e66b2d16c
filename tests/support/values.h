// SPDX-License-Identifier: Apache-2.0
//
// Between host tensors and plain doubles, and bit comparison.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/ops/op.h"

namespace eadem::test {

using ops::RefTensor;

// Every element of a host tensor, plain and contiguous or encoded, widened. An undefined view gives an empty RefTensor.
RefTensor widen(const TensorView& host);
std::vector<RefTensor> widen(const std::vector<Tensor>& host);

// A host tensor of `dtype`, each value rounded once.
Tensor narrow(const RefTensor& values, DType dtype);

// A RefTensor of zeros.
RefTensor zeros(const Shape& shape);

// Byte by byte; names the first element that differs.
testing::AssertionResult same_bits(const TensorView& a, const TensorView& b);

}  // namespace eadem::test
