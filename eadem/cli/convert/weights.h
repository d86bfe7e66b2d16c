// SPDX-License-Identifier: Apache-2.0
//
// The weights of a model in another order, type or file, tensor by tensor: what is to be done is settled from names,
// types and shapes, before any value is read; then one band of rows at a time is read, stored in its new way and
// written, so that the largest model needs little memory.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eadem/core/thread_pool.h"
#include "eadem/engine/calibration.h"
#include "eadem/io/weight_writer.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/llama_config.h"

namespace eadem::cli {

// What rounding did to a tensor. A relative error is the root of the sum of squared errors over that of the values.
struct Rounding {
  double largest = 0;
  double relative = 0;
  double relative_output = 0;  // with each column's squares weighted by its importance; 0 where that is not known
};

struct ConvertedTensor {
  std::string from, to;
  std::string parameter;  // the model's name for it
  WeightType before, type;
  Shape shape;
  // GGUF files of the Llama architecture order the rows of each head of q and k for interleaved rotation: pairs (2i,
  // 2i + 1) instead of (i, i + head_dim / 2). Where rows change order this is head_dim, else 0.
  int64_t permuted_head_dim = 0;
  bool to_interleaved = false;
  Tensor constant;  // not from the file: written as it is
  Rounding rounding;

  io::TensorHeader header() const { return {to, type, shape}; }
};

struct ConvertPlan {
  bool target_gguf;
  std::string type;  // a name of convert_type_names(), or "as-is"
};

// Every tensor that the converted model has, in order. Throws DataCorrupted, NotFound or Unsupported naming the tensor.
std::vector<ConvertedTensor> plan_weights(const models::Checkpoint& checkpoint, const models::LlamaConfig& config,
                                          const ConvertPlan& plan);

// Reads, converts and writes every tensor, and notes what rounding did. `calibration` may be null. `progress(done,
// total, name)` in bytes of the target, may throw to stop. Throws InvalidArgument naming tensor, row and column for
// values that a type cannot hold.
void convert_weights(std::vector<ConvertedTensor>& tensors, const models::Checkpoint& checkpoint,
                     const engine::Calibration* calibration, ThreadPool& pool, io::WeightWriter& writer,
                     const std::function<void(int64_t done, int64_t total, const std::string& name)>& progress);

// Where row `row` of the converted tensor stands in the original.
int64_t source_row(const ConvertedTensor& tensor, int64_t row);

// The type that most bytes of the matrices have.
WeightType most_common_type(const std::vector<ConvertedTensor>& tensors);

int64_t stored_bytes(const WeightType& type, const Shape& shape);

}  // namespace eadem::cli
