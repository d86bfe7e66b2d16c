// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encodings/stacked_encoding.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/error.h"
#include "eadem/core/lookups.h"

namespace eadem {

namespace {

struct Stacks {
  std::mutex mutex;
  std::map<const Encoding*, std::unique_ptr<const StackedEncoding>> by_matrix;
};

Stacks& stacks() {
  static Stacks all;
  return all;
}

Shape matrix_shape(const Shape& shape) { return Shape{shape[1], shape[2]}; }

void check_stack(const Encoding& encoding, const Shape& shape) {
  if (shape.rank() != 3)
    throw InvalidArgument("{} holds stacks of matrices; the tensor is {}", encoding.name(), to_string(shape));
}

}  // namespace

const StackedEncoding* StackedEncoding::of_matrices(const Encoding& matrix) {
  count_lookup();
  Stacks& all = stacks();
  const std::scoped_lock lock(all.mutex);
  std::unique_ptr<const StackedEncoding>& stack = all.by_matrix[&matrix];
  if (stack == nullptr) stack = std::make_unique<const StackedEncoding>(matrix);
  return stack.get();
}

const StackedEncoding* StackedEncoding::of(const Encoding* encoding) {
  count_lookup();
  return dynamic_cast<const StackedEncoding*>(encoding);
}

StackedEncoding::StackedEncoding(const Encoding& matrix)
    : matrix_(matrix), name_("stacked_" + std::string(matrix.name())) {}

std::vector<PlaneSpec> StackedEncoding::planes(const Shape& shape) const {
  check_stack(*this, shape);
  std::vector<PlaneSpec> result = matrix_.planes(matrix_shape(shape));
  for (PlaneSpec& plane : result) plane.shape[0] *= shape[0];
  return result;
}

int64_t StackedEncoding::num_pieces(const Shape& shape) const {
  return shape[0] * matrix_.num_pieces(matrix_shape(shape));
}

int64_t StackedEncoding::rows_of_piece(const Shape& shape) const {
  const int64_t rows = matrix_.rows_of_piece(matrix_shape(shape));
  return rows > 0 && shape[1] % rows == 0 ? rows : 0;
}

void StackedEncoding::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                    int64_t end) const {
  EADEM_CHECK(encoded.encoding == this, "encoded is not {}", name_);
  const int64_t pieces = matrix_.num_pieces(matrix_shape(encoded.shape));
  const MatrixStack to(encoded), from(values);
  while (begin < end) {
    const int64_t index = begin / pieces, first = begin % pieces, last = std::min(pieces, first + end - begin);
    matrix_.encode_pieces(to.matrix(encoded, index), from.matrix(values, index), first, last);
    begin += last - first;
  }
}

void StackedEncoding::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const int64_t rows = encoded.shape[1];
  matrix_.decode_row(row, MatrixStack(encoded).matrix(encoded, index / rows), index % rows);
}

int64_t StackedEncoding::first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const {
  const int64_t rows = encoded.shape[1], columns = encoded.shape[2];
  const MatrixStack stack(encoded);
  while (begin < end) {
    const int64_t index = begin / rows, first = begin % rows, last = std::min(rows, first + end - begin);
    const int64_t found = matrix_.first_not_finite(stack.matrix(encoded, index), first, last);
    if (found >= 0) return index * rows * columns + found;
    begin += last - first;
  }
  return -1;
}

void StackedEncoding::slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const {
  EADEM_CHECK(part.encoding == this && whole.encoding == this, "a cut of another encoding than {}", name_);
  const MatrixStack to(part), from(whole);
  if (axis > 0) {
    for (int64_t i = 0; i < part.shape[0]; ++i)
      matrix_.slice(to.matrix(part, i), from.matrix(whole, i), axis - 1, begin);
    return;
  }
  EADEM_CHECK(begin >= 0 && begin + part.shape[0] <= whole.shape[0], "matrices {} to {} of {}", begin,
              begin + part.shape[0], to_string(whole.shape));
  const TensorView first = from.matrix(whole, begin);
  const std::vector<PlaneSpec> specs = planes(part.shape);
  for (size_t i = 0; i < specs.size(); ++i)
    std::memcpy(part.plane(static_cast<int>(i)), first.plane(static_cast<int>(i)),
                static_cast<size_t>(specs[i].size_bytes()));
}

MatrixStack::MatrixStack(const Encoding* encoding, DType dtype, const Shape& shape)
    : encoding_(matrix_encoding(encoding)), dtype_(dtype), shape_(matrix_shape(shape)) {
  if (encoding_ == nullptr) {
    plane_bytes_[0] = shape_.num_elements() * static_cast<int64_t>(dtype_size(dtype));
    return;
  }
  const std::vector<PlaneSpec> specs = encoding_->planes(shape_);
  num_planes_ = static_cast<int>(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) plane_bytes_[i] = specs[i].size_bytes();
}

TensorView MatrixStack::matrix(const TensorView& stack, int64_t index) const {
  const auto plane = [&](int i) -> void* {
    return static_cast<std::byte*>(stack.plane(i)) + index * plane_bytes_[static_cast<size_t>(i)];
  };
  TensorView view(plane(0), dtype_, shape_);
  view.encoding = encoding_;
  for (int i = 1; i < num_planes_; ++i) view.more_planes[static_cast<size_t>(i - 1)] = plane(i);
  return view;
}

const Encoding* matrix_encoding(const Encoding* stack) {
  const StackedEncoding* stacked = StackedEncoding::of(stack);
  return stacked == nullptr ? stack : &stacked->matrix();
}

const Encoding* stack_encoding(const Encoding* matrix) {
  if (matrix == nullptr || BlockEncoding::of(matrix) != nullptr || RowEncoding::of(matrix) != nullptr ||
      StackedEncoding::of(matrix) != nullptr)
    return matrix;
  return StackedEncoding::of_matrices(*matrix);
}

}  // namespace eadem
