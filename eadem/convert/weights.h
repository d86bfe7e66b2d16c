// SPDX-License-Identifier: Apache-2.0
//
// Stores the weights of a model in another order, type or file, tensor by tensor. A plan is made from names, types and
// shapes before any value is read. Then one band of rows at a time is read, converted and written, so that the largest
// model needs little memory; a tensor whose values move is made whole before.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "eadem/core/machine/thread_pool.h"
#include "eadem/engine/calibration.h"
#include "eadem/io/weight_writer.h"
#include "eadem/models/parameter_reader.h"

namespace eadem::convert {

// The rounding errors of a tensor. A relative error is the root of the sum of squared errors over that of the values.
struct Rounding {
  double largest = 0;
  double relative = 0;
  double relative_output = 0;  // squares weighted by each column's importance; 0 if that is not known
};

// The sums that Rounding is made of, in f64, so that their order matters little.
struct RoundingSums {
  double largest = 0, squares = 0, total = 0, weighted_squares = 0, weighted_total = 0;

  // Adds a row; `importance` has a weight for each value, or is empty.
  void add_row(std::span<const float> values, std::span<const float> rounded, std::span<const float> importance);
  void add(const RoundingSums& other);
  Rounding rounding() const;
};

struct ConvertedTensor {
  std::string from, to;         // names in the files; the source may have several tensors for one
  std::string parameter;        // the (first) parameter of the model that the tensor holds
  models::WeightRecipe recipe;  // the tensor, made of parameters
  WeightType before, type;
  Shape shape;
  Tensor constant;  // written as it is, instead of a tensor of the file
  Rounding rounding;

  io::TensorHeader header() const { return {to, type, shape}; }
};

struct ConvertPlan {
  bool target_gguf;
  std::string type;  // a name of convert_type_names(), or "as-is"
};

// Every tensor that the converted model has, in order. Throws DataCorrupted, NotFound or Unsupported naming the tensor.
std::vector<ConvertedTensor> plan_weights(const models::Checkpoint& checkpoint, const ConvertPlan& plan);

// Reads, converts and writes every tensor, and records rounding errors. `calibration` may be null. `progress(done,
// total, name)` counts bytes of the target and may throw to stop. Throws InvalidArgument naming tensor, row and column
// for values that a type cannot hold.
void convert_weights(std::vector<ConvertedTensor>& tensors, const models::Checkpoint& checkpoint,
                     const engine::Calibration* calibration, ThreadPool& pool, io::WeightWriter& writer,
                     const std::function<void(int64_t done, int64_t total, const std::string& name)>& progress);

// Whether a matrix is transposed, or parts of it are side by side that are (GPT-2's): its columns are a layer's
// outputs.
bool columns_are_outputs(const models::WeightRecipe& recipe);

// The type that most bytes of the matrices have.
WeightType most_common_type(const std::vector<ConvertedTensor>& tensors);

int64_t stored_bytes(const WeightType& type, const Shape& shape);

}  // namespace eadem::convert
