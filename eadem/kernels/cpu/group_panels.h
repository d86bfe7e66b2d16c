// SPDX-License-Identifier: Apache-2.0
//
// GroupPanels: the layout in which the CPU's matrix products read a weight [out, in] that a GroupEncoding stores. Codes
// stand as in QuantizedPanels, whose products read them; `in` is a multiple of 32.
//
// Planes, for P = ceil(out / 16) panels:
//   quants  u8 [P, in / 32, 64 * bits], columns in the order of groups
//   scales  as they are stored, f16, bf16 or f32 [P, groups, 16]
//   zeros   u8 [P, groups, 16], with zero points
//   order   i32 [in], with an order of columns: the column of x that meets each code
#pragma once

#include "eadem/core/encodings/group_encoding.h"
#include "eadem/kernels/cpu/quantized_panels.h"

namespace eadem::kernels::cpu {

class GroupPanels final : public Encoding {
 public:
  // The packing of weights stored as `encoding`, or `encoding` itself where it is such a packing; null for others.
  static const GroupPanels* of(const Encoding* encoding);

  explicit GroupPanels(const GroupEncoding& stored);

  const GroupEncoding& stored() const { return stored_; }
  const QuantizedLayout& layout() const { return layout_; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // panels
  // `values` is stored as `stored()`.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void cut(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  const GroupEncoding& stored_;
  QuantizedLayout layout_;
  std::string name_;
};

// The packing in which products read weights stored as `encoding`, blocks or groups (or `encoding` itself where it is
// one); null for others.
const Encoding* quantized_packing_of(const Encoding* encoding);

}  // namespace eadem::kernels::cpu
