// SPDX-License-Identifier: Apache-2.0
//
// Between host tensors and plain doubles, and bit comparison.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/kernels/reference/values.h"
#include "eadem/ops/op.h"

namespace eadem::test {

using ops::RefTensor;

using kernels::reference::narrow;
using kernels::reference::widen;
std::vector<RefTensor> widen(const std::vector<Tensor>& host);

// A RefTensor of zeros.
RefTensor zeros(const Shape& shape);

// Byte by byte; names the first element that differs.
testing::AssertionResult same_bits(const TensorView& a, const TensorView& b);

}  // namespace eadem::test
