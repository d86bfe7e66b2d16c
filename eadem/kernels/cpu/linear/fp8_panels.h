// SPDX-License-Identifier: Apache-2.0
//
// Fp8Panels: the layout in which the CPU's matrix products read a weight [out, in] that an Fp8Encoding stores. A
// product decodes it block by block, in the first-level cache, to the f32 values of the encoding. The result has the
// bits of a product with the decoded weight, while the weight takes one byte an element.
//
// Planes, for P = ceil(out / 16) panels; outputs that the last panel lacks are zero:
//   codes   u8 [P, in, 16]
//   scales  f32 [P, blocks of columns, 16]
#pragma once

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/tensor.h"

namespace eadem::kernels::cpu {

class Fp8Panels final : public Encoding {
 public:
  // Returns the packing of weights stored as `encoding`, `encoding` itself if it already is this packing, or null for
  // any other encoding.
  static const Fp8Panels* of(const Encoding* encoding);

  explicit Fp8Panels(const Fp8Encoding& stored);

  const Fp8Encoding& stored() const { return stored_; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // panels
  // `values` must be stored as `stored()`. Throws InvalidArgument for a scale of 2^119 or more.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  const Fp8Encoding& stored_;
  std::string name_;
};

}  // namespace eadem::kernels::cpu
