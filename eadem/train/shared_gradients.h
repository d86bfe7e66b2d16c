// SPDX-License-Identifier: Apache-2.0
//
// SharedGradients: the gradients of parameters that two stages of pp have (tied weights). One rank adds to such a
// gradient, pass by pass, the term of the later use, the head, and then that of the earlier one, the embedding. So do
// two stages: the last one makes its term of each pass of a group in a tensor of its own; when the group is through the
// backward pass, the first one receives these terms in the order of the passes and adds each before its own
// (Program::run_deferred). It takes the sum of a step back to the last one. The bits are one rank's where the later use
// makes its term of a pass as one sum.
//
// All ranks of pp make one and call its methods in the same order.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "eadem/pipeline/program.h"

namespace eadem::train {

class SharedGradients {
 public:
  // `programs`: of the passes of a group; they outlive this.
  SharedGradients(std::shared_ptr<Device> device, const Mesh& mesh,
                  std::span<const std::unique_ptr<pipeline::Program>> programs);

  // Whether an earlier stage sums the gradient of a parameter.
  bool is_summed_elsewhere(const std::string& parameter) const;
  // Binds the state of a gradient in every program: to `values`, on the device, where a step's sum is wanted, or to a
  // tensor for each pass.
  void bind(const std::string& parameter, const TensorView& values);

  // Before the backward passes of a group.
  void clear();
  // After these; `symbols` are those of the passes.
  void add(std::span<const SymbolValues> symbols, const pipeline::StepObserver* observer);
  // After the last group, when the first stage has summed the gradients over its other axes.
  void hand_over();

 private:
  void add_received(const TensorView& to, int stage);
  void send(const TensorView& from, int stage);

  std::shared_ptr<Device> device_;
  Mesh mesh_;
  std::span<const std::unique_ptr<pipeline::Program>> programs_;
  std::vector<pipeline::SharedParameter> all_;
  std::map<std::string, TensorView> sums_;                // of this stage's shared parameters
  std::map<std::string, std::vector<Tensor>> of_passes_;  // on the last of two stages: of all passes but the first
  std::unique_ptr<pipeline::Program> adder_;              // on the first of two stages: sum += received_
  Tensor received_;
};

}  // namespace eadem::train
