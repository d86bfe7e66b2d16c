// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encoding.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "eadem/core/tensor.h"

namespace eadem {

void parallel_pieces(int64_t count, ParallelFor parallel_for, FunctionRef<void(int64_t begin, int64_t end)> work) {
  const int64_t tasks = std::min<int64_t>(count, 256);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(tasks));
  const auto task = [&](int64_t index) {
    try {
      work(index * count / tasks, (index + 1) * count / tasks);
    } catch (...) {
      errors[static_cast<size_t>(index)] = std::current_exception();
    }
  };
  parallel_for(tasks, task);
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

int64_t Encoding::rows_of_piece(const Shape&) const { return 0; }

void Encoding::encode(const TensorView& encoded, const TensorView& values) const {
  encode_pieces(encoded, values, 0, num_pieces(encoded.shape));
}

void Encoding::encode(const TensorView& encoded, const TensorView& values, ParallelFor parallel_for) const {
  parallel_pieces(num_pieces(encoded.shape), parallel_for,
                  [&](int64_t begin, int64_t end) { encode_pieces(encoded, values, begin, end); });
}

void Encoding::decode(const TensorView& plain, const TensorView& encoded) const {
  const int rank = encoded.shape.rank();
  const int64_t columns = rank == 0 ? 1 : encoded.shape[rank - 1];
  if (columns == 0) return;
  float* values = plain.as<float>();
  for (int64_t row = 0; row < encoded.shape.num_elements() / columns; ++row)
    decode_row(values + row * columns, encoded, row);
}

int64_t Encoding::first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const {
  const int64_t columns = encoded.shape.rank() == 0 ? 1 : encoded.shape.back();
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t index = begin; index < end; ++index) {
    decode_row(row.data(), encoded, index);
    for (int64_t k = 0; k < columns; ++k)
      if (!std::isfinite(row[static_cast<size_t>(k)])) return index * columns + k;
  }
  return -1;
}

int64_t encoded_bytes(const Encoding& encoding, const Shape& shape) {
  int64_t total = 0;
  for (const PlaneSpec& plane : encoding.planes(shape)) total += plane.size_bytes();
  return total;
}

}  // namespace eadem
