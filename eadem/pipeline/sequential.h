// SPDX-License-Identifier: Apache-2.0
//
// Sequential: chains modules and owns one pipeline. For building and training small things without an engine; the rows
// of its input are independent of each other or the modules say otherwise.
#pragma once

#include <memory>

#include "eadem/pipeline/module.h"
#include "eadem/pipeline/program.h"

namespace eadem::pipeline {

class Sequential {
 public:
  // `row`: the fixed dimensions of one row of the input, whose first dimension is `tokens`, f32. `max_tokens`: the
  // largest number of rows. Parameters start uninitialized: load them through `parameters()` before the first step.
  Sequential(std::vector<std::shared_ptr<const Module>> modules, const std::vector<int64_t>& row, int64_t max_tokens,
             std::shared_ptr<Device> device);

  ParameterStore& parameters() { return *parameters_; }

  // y = f(x): the inference pass. Host tensors [rows, …]; throws InvalidArgument when x has another shape.
  Tensor inference(const TensorView& x);
  // Computes the bits of `inference`, and keeps what `backward` needs.
  Tensor forward(const TensorView& x);
  // After `forward`: gradients of the parameters accumulate, the gradient of x is returned.
  Tensor backward(const TensorView& dy);
  // Gradient of a parameter, on the host.
  Tensor gradient(const std::string& parameter) const;
  void zero_gradients();

 private:
  void check(const TensorView& tensor, const TensorType& type, std::string_view name) const;
  Tensor read(const Program& program, ValueId value) const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<ParameterStore> parameters_;
  std::unique_ptr<Program> inference_;
  std::unique_ptr<Program> training_;
  std::map<std::string, Tensor> gradients_;  // on the device
  SymbolValues forward_;                     // symbols of the last forward pass, which `backward` reads
};

}  // namespace eadem::pipeline
