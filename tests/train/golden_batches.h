// SPDX-License-Identifier: Apache-2.0
//
// The batches of the training goldens.
#pragma once

#include <filesystem>
#include <string>

#include "eadem/core/tensor.h"
#include "eadem/train/token_data.h"

namespace eadem::train {

inline std::filesystem::path golden(const std::string& name) {
  return std::filesystem::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name;
}

// ids [steps, batch, seq + 1] i32: every row is one document whose tokens but the last are inputs.
inline Batch batch_of(const Tensor& ids, int64_t step) {
  const int64_t rows = ids.shape()[1], length = ids.shape()[2];
  Batch batch;
  clear(batch);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<uint32_t> document;
    for (int64_t i = 0; i < length; ++i)
      document.push_back(static_cast<uint32_t>(ids.view.as<int32_t>()[(step * rows + row) * length + i]));
    append_piece(batch, document, 0, length - 1);
  }
  return batch;
}

}  // namespace eadem::train
