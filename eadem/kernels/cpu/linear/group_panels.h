// SPDX-License-Identifier: Apache-2.0
//
// GroupPanels: the layout in which the CPU's matrix products read a weight [out, in] that a GroupEncoding stores. Codes
// are laid out as in QuantizedPanels, whose products read them; `in` is a multiple of 32.
//
// Planes, for P = ceil(out / 16) panels:
//   quants  u8 [P, in / 32, 64 * bits], columns in the order of groups
//   scales  as they are stored, f16, bf16 or f32 [P, groups, 16]
//   zeros   u8 [P, groups, 16], with zero points
//   order   i32 [in], with an order of columns: the column of x that meets each code
#pragma once

#include "eadem/core/encodings/group_encoding.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"

namespace eadem::kernels::cpu {

class GroupPanels final : public Encoding {
 public:
  // Returns the packing of weights stored as `encoding`, `encoding` itself if it already is this packing, or null for
  // any other encoding.
  static const GroupPanels* of(const Encoding* encoding);

  explicit GroupPanels(const GroupEncoding& stored);

  const GroupEncoding& stored() const { return stored_; }
  const QuantizedLayout& layout() const { return layout_; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // panels
  // `values` must be stored as `stored()`.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  const GroupEncoding& stored_;
  QuantizedLayout layout_;
  std::string name_;
};

// Returns the packing in which products read weights stored as `encoding`, in blocks or groups; `encoding` itself if it
// already is one; null for any other encoding.
const Encoding* quantized_packing_of(const Encoding* encoding);

}  // namespace eadem::kernels::cpu
