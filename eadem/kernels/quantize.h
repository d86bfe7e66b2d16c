// SPDX-License-Identifier: Apache-2.0
//
// y = x in the encoding `to`: rows of activations, or a weight, rounded once for all products that multiply them so.
//
//   inputs   x [rows, columns] f32 or bf16
//            scaling [2] f32 (state; with a delayed Fp8TensorEncoding)
//   outputs  y [rows, columns], encoded
//            scaling (likewise)
//
// The encoding defines the rounding (Encoding::encode); every kernel has its bits. In a row-wise encoding a row does
// not depend on others. In an Fp8TensorEncoding all do: that of the inference pass need not have transposed codes.
//
// Where ranks of tp have a part of x each, its scale is that of all parts: every rank calls the kernel, and they tell
// each other their largest magnitudes, 4 bytes to each other rank.
//
// Delayed scaling: the scale is that of the magnitude scaling[0], or of x itself while that is 0. The forward pass
// makes scaling[1] the largest magnitude of x if that is larger; NaN if a value is not finite. Whoever owns the state
// decides what comes of it between steps.
#pragma once

#include "eadem/core/encoding.h"

namespace eadem::kernels {

struct QuantizeAttrs {
  const Encoding* to = nullptr;
};

}  // namespace eadem::kernels
