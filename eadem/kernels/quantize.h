// SPDX-License-Identifier: Apache-2.0
//
// y = x in the encoding `to`: rows of activations, or a weight, rounded once for all products that multiply them so.
//
//   inputs   x [rows, columns] f32 or bf16
//   outputs  y [rows, columns], encoded
//
// The encoding defines the rounding (Encoding::encode); every kernel has its bits. In a row-wise encoding a row does
// not depend on others.
#pragma once

#include "eadem/core/encoding.h"

namespace eadem::kernels {

struct QuantizeAttrs {
  const Encoding* to = nullptr;
};

}  // namespace eadem::kernels
