// SPDX-License-Identifier: Apache-2.0
//
// The encodings that products with quantized weights are tested with: every block type; integers in groups of every
// size, with scales of every dtype, with zero points and an order of columns and without; 8-bit floats.
#pragma once

#include <vector>

#include "eadem/core/encoding.h"

namespace eadem::workloads {

struct QuantizedType {
  const Encoding* encoding;
  int64_t unit;    // rows are multiples of so many columns
  bool has_order;  // of its columns
};

std::vector<QuantizedType> quantized_types();

}  // namespace eadem::workloads
