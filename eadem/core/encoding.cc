// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encoding.h"

#include "eadem/core/tensor.h"

namespace eadem {

void Encoding::encode(const TensorView& encoded, const TensorView& values) const {
  encode_pieces(encoded, values, 0, num_pieces(encoded.shape));
}

void Encoding::decode(const TensorView& plain, const TensorView& encoded) const {
  const int rank = encoded.shape.rank();
  const int64_t columns = rank == 0 ? 1 : encoded.shape[rank - 1];
  if (columns == 0) return;
  float* values = plain.as<float>();
  for (int64_t row = 0; row < encoded.shape.num_elements() / columns; ++row)
    decode_row(values + row * columns, encoded, row);
}

}  // namespace eadem
