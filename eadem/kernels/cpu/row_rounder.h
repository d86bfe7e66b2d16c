// SPDX-License-Identifier: Apache-2.0
//
// RowRounder: writes rows of f32 in an encoding that the products of linear read. It is what quantize does, and what
// kernels do that make such rows.
#pragma once

#include "eadem/kernels/cpu/linear/quantized/quantized_rows.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

class RowRounder {
 public:
  // Why there is none for `to` on the device; empty if there is one.
  static std::string refusal_of(const Encoding* to, const CpuDevice& device);
  // Requires that there is one.
  RowRounder(const Encoding* to, const CpuDevice& device);

  // Writes rows [begin, end) of `source` to the same rows of y, which is encoded.
  void round(const TensorView& y, const RoundedSource& source, int64_t begin, int64_t end) const;

 private:
  void (*round_)(const Int8RowPlanes& q, const RoundedSource& source, int64_t begin, int64_t end) = nullptr;  // int8
};

}  // namespace eadem::kernels::cpu
