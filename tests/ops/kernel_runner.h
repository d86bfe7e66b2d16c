// SPDX-License-Identifier: Apache-2.0
//
// Runs one kernel on any device the way the pipeline would: packs parameters as the kernel asks, gives it scratch,
// binds views, copies results back. On top of that it surrounds every tensor with guard bytes and can place tensors at
// addresses that are aligned to their element only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/mesh/communicator.h"
#include "eadem/ops/op.h"

namespace eadem::test {

// One pass of one op: types and host tensors of the ports of that pass, in contract order.
struct PassCall {
  ops::OpPtr op;
  kernels::Pass pass = kernels::Pass::inference;
  std::vector<TensorType> input_types, output_types;
  SymbolValues symbols;
  std::vector<Tensor> inputs;   // undefined: absent
  std::vector<Tensor> outputs;  // initial contents: what accumulates. Undefined: not wanted
  // Output i is the memory of input output_alias[i], or -1.
  std::vector<int> output_alias;

  kernels::KernelRequest request(const Device& device) const;
};

struct Placement {
  bool element_aligned = false;  // else 64 bytes
};

// The outputs after the kernel ran, on the host (undefined where not wanted). Adds a test failure, with `label`, for
// every guard byte that changed and every input that is no output's memory and changed.
std::vector<Tensor> run_kernel(Device& device, const kernels::Kernel& kernel, const PassCall& call, Placement placement,
                               const std::string& label);

}  // namespace eadem::test
