// SPDX-License-Identifier: Apache-2.0
//
// FragmentBlocks: the layout in which the GPU's matrix products read an encoded weight [out, in]: blocks of 16 rows and
// 256 columns, each contiguous, with codes in the order of the fragments that mma.sync reads (fragment_layout.h). Codes
// of 5 bits take 6, codes of 2 and 3 bits take 4. What has no layout of its own (8-bit floats, columns in an order of
// their own) is rounded to bf16. Rows and columns that fill up the last blocks are zeros.
//
// Plane: blocks u8 [ceil(out / 16), ceil(in / 256), block_bytes]. `in` is a multiple of kLinearStreamMultiple.
#pragma once

#include <string>

#include "eadem/core/encoding.h"
#include "eadem/kernels/cuda/linear/fragment_layout.h"

namespace eadem::kernels::cuda {

class FragmentBlocks final : public Encoding {
 public:
  // Returns the packing of weights stored as `encoding`, `encoding` itself if it already is one, or null for null.
  // Thread-safe. It lives as long as the process.
  static const FragmentBlocks* of(const Encoding* encoding);

  explicit FragmentBlocks(const Encoding& stored);  // for `of`

  const FragmentLayout& layout() const { return layout_; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // rows of blocks
  // `values` must be stored as the encoding that this packs.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  const Encoding& stored_;
  FragmentLayout layout_;
  std::string name_;
};

}  // namespace eadem::kernels::cuda
