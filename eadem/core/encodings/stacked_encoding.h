// SPDX-License-Identifier: Apache-2.0
//
// StackedEncoding: tensors [matrices, rows, columns] whose matrices are in an encoding that takes matrices only, such
// as the experts of a layer, packed or with scales for groups. Each plane is the planes of the matrices, one after
// another:
//   name [matrices * n, …] for a plane [n, …] of a matrix.
// Encodings of rows (GGUF's blocks) need no stack: they take tensors of any rank.
#pragma once

#include <array>
#include <string>

#include "eadem/core/encoding.h"
#include "eadem/core/tensor.h"

namespace eadem {

class StackedEncoding final : public Encoding {
 public:
  // The stack of matrices in `matrix`, which lives as long as the process. There is one for each. Thread-safe.
  static const StackedEncoding* of_matrices(const Encoding& matrix);
  // `encoding` as what it is, or null.
  static const StackedEncoding* of(const Encoding* encoding);

  const Encoding& matrix() const { return matrix_; }
  // "stacked_" and the name of the matrices' encoding.
  std::string_view name() const override { return name_; }

  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // pieces of all matrices, in order
  int64_t rows_of_piece(const Shape& shape) const override;
  // `values` is what the matrices' encoding takes, stacked: plain, in blocks, or in a stack of its own.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  int64_t first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const override;
  // Along the first axis any matrices; along the others as the matrices' encoding cuts.
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

  explicit StackedEncoding(const Encoding& matrix);  // public only for `of_matrices`

 private:
  const Encoding& matrix_;
  std::string name_;
};

// The matrices of tensors of one type and shape [matrices, rows, columns], plain or encoded: where they lie is settled
// once, so that `matrix` allocates nothing and looks nothing up.
class MatrixStack {
 public:
  MatrixStack(const Encoding* encoding, DType dtype, const Shape& shape);
  explicit MatrixStack(const TensorView& stack) : MatrixStack(stack.encoding, stack.dtype, stack.shape) {}

  // Matrix `index` of `stack`, which has the type and shape that this was made for.
  TensorView matrix(const TensorView& stack, int64_t index) const;

 private:
  const Encoding* encoding_;  // of a matrix; null: plain
  DType dtype_;
  Shape shape_;  // of a matrix
  int num_planes_ = 1;
  std::array<int64_t, kMaxPlanes> plane_bytes_{};  // of a matrix
};

// The encoding of each matrix of a tensor in `stack`: that of the matrices of a stack, else `stack` itself.
const Encoding* matrix_encoding(const Encoding* stack);
// The encoding of a tensor of rank 3 whose matrices are in `matrix`: `matrix` itself where it takes any rank.
const Encoding* stack_encoding(const Encoding* matrix);

}  // namespace eadem
