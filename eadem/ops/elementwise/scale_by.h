// SPDX-License-Identifier: Apache-2.0
//
// y[i] = x[i] * scale[index[i]], or without an index x[i] * scale[0]. Ports, dtypes and gradients: kernels/scale_by.h.
//
// Sharding: x without an index may be divided along any axis; scale is whole.
#pragma once

#include "eadem/kernels/scale_by.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class ScaleBy final : public Op {
 public:
  explicit ScaleBy(const kernels::ScaleByAttrs& attrs) : attrs_(attrs) {}

  std::string_view name() const override { return "scale_by"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override { return attrs_.indexed ? "indexed" : ""; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kScale, kIndex };
  kernels::ScaleByAttrs attrs_;
};

}  // namespace eadem::ops
