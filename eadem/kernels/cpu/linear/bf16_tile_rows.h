// SPDX-License-Identifier: Apache-2.0
//
// Bf16TileRows: activations [rows, columns] rounded to bf16, in the order in which AMX tiles read them (amx.h). Values
// are rounded to nearest even, subnormal ones to zero.
//
// Plane: data bf16 [ceil(columns / 256), rows rounded up to 32, 256]: TileRows::in_order. A row is padded with zeros to
// whole tiles of 32 values; what lies beyond, and rows that are padding, is not written.
#pragma once

#include "eadem/core/encoding.h"
#include "eadem/kernels/cpu/linear/amx.h"

namespace eadem::kernels::cpu {

class Bf16TileRows final : public Encoding {
 public:
  static const Bf16TileRows& instance();

  std::string_view name() const override { return "bf16_tile_rows"; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;  // of rank 2
  int64_t num_pieces(const Shape& shape) const override;             // rows
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  Bf16TileRows() = default;
};

}  // namespace eadem::kernels::cpu
