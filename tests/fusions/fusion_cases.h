// SPDX-License-Identifier: Apache-2.0
//
// Fused ops and the parts that they replace, on sizes around vector, panel and chunk widths. The parts are wired by the
// fusion's pattern; nothing of the fused op's own code is used to compute what they give.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/fusions/fusion.h"

namespace eadem::test {

struct FusionCase {
  std::string name;
  const fusions::Fusion* fusion = nullptr;
  ops::OpPtr fused;
  std::vector<ops::OpPtr> parts;   // one per pattern node
  std::vector<TensorType> inputs;  // of the fused op, in port order
  SymbolValues symbols;
  std::shared_ptr<const FusionCase> inputs_like = nullptr;  // the case that has generators for its inputs, or null
};

// Every fusion; activations and parameters in f32, but where the name says otherwise.
std::vector<FusionCase> fusion_cases();

// Host tensors for the fused op's inputs, made by the generators of the parts, or of those of `inputs_like`.
std::vector<Tensor> make_inputs(const FusionCase& fusion_case, uint64_t seed);

// Runs `visit` for each pattern node with the types of its ports, in order; ids < 0 stand for absent ports.
struct PartPorts {
  size_t node;
  const ops::Op& op;
  std::span<const int> input_values, output_values;  // pattern values
  std::vector<TensorType> inputs, outputs;
};
void for_each_part(const FusionCase& fusion_case, const std::function<void(const PartPorts&)>& visit);

// One more than the largest pattern value.
size_t num_values(const fusions::Fusion& fusion);

}  // namespace eadem::test
