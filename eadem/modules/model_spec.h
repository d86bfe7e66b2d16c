// SPDX-License-Identifier: Apache-2.0
//
// ModelSpec: what modules may know of a model when they choose their hardware configuration. Queryable without
// building.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "eadem/core/encoding.h"

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
  // The storage type of most of the weights in the checkpoint, that of each parameter by name (nothing for a parameter
  // that the checkpoint lacks), and the file that states them.
  std::optional<WeightType> checkpoint_type;
  std::function<std::optional<WeightType>(const std::string& parameter)> checkpoint_type_of;
  std::string checkpoint_source;
};

}  // namespace eadem::modules
