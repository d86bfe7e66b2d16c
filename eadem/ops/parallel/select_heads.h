// SPDX-License-Identifier: Apache-2.0
//
// A rank's key-value heads out of all of them, for models with fewer of them than ranks or a number that does not
// divide. Ports and the choice: kernels/attention/select_heads.h. The result is divided along its heads: no two ranks'
// query heads are the same, though they may read the same key-value head.
#pragma once

#include "eadem/kernels/attention/select_heads.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class SelectHeads final : public Op {
 public:
  // Throws InvalidArgument when a head that is read does not exist.
  explicit SelectHeads(const kernels::SelectHeadsAttrs& attrs);

  std::string_view name() const override { return "select_heads"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::SelectHeadsAttrs attrs_;
};

}  // namespace eadem::ops
