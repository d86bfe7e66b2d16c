// SPDX-License-Identifier: Apache-2.0
#include "soft_cap.h"

#include <cmath>

#include "soft_cap_kernel.h"

namespace example {

using namespace eadem;

std::vector<TensorType> SoftCap::infer_types(std::span<const TensorType> inputs) const {
  ops::expect_dtype(name(), "x", inputs[0], ops::kF32);
  return {inputs[0]};
}

ops::Cost SoftCap::cost(ops::Pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                        const SymbolValues& symbols) const {
  constexpr double kFlopsPerElement = 12;  // a division, a tanh, a product
  return {kFlopsPerElement * static_cast<double>(inputs[0].num_elements(symbols)),
          ops::traffic_bytes(inputs, outputs, symbols)};
}

void SoftCap::reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                        std::span<ops::RefTensor> outputs) const {
  const double cap = attrs_.cap;
  for (size_t i = 0; i < outputs[0].data.size(); ++i) {
    const double v = inputs[0].data[i];
    outputs[0].data[i] =
        pass == ops::Pass::backward ? inputs[1].data[i] * (1 - v / cap * (v / cap)) : cap * std::tanh(v / cap);
  }
}

ops::KernelList SoftCap::kernels(const kernels::Backend& backend) const {
  return backend.name == "cpu" ? soft_cap_kernels() : ops::KernelList();
}

}  // namespace example
