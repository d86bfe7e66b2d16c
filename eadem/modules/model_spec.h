// SPDX-License-Identifier: Apache-2.0
//
// ModelSpec: what modules may know of a model when they choose their hardware configuration. Queryable without
// building.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "eadem/core/dtype.h"

namespace eadem::modules {

struct ModelSpec {
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab = 0;
  int64_t num_parameters = 0;
  // The dtype of the weights as stored in the checkpoint, and the file that says so.
  std::optional<DType> checkpoint_dtype;
  std::string checkpoint_source;
};

}  // namespace eadem::modules
