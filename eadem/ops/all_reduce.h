// SPDX-License-Identifier: Apache-2.0
//
// y = sum of x over the ranks; makes a replicated value of partial sums. Ports: kernels/all_reduce.h.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class AllReduce final : public Op {
 public:
  std::string_view name() const override { return "all_reduce"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // Only a partial value may be summed: a replicated one would be multiplied by the number of ranks.
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  bool passes_gradient_through() const override { return true; }
  // Local traffic only; the wire is the communicator's.
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  // With one rank the result is the input.
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
