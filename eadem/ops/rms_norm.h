// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = x[r, :] / rms(x[r, :]) * weight. Ports, dtypes and gradients: kernels/rms_norm.h.
//
// Sharding: x may be divided along any axis but the last; weight is whole, or divided as x is where x is divided along
// the groups.
#pragma once

#include "eadem/kernels/rms_norm.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class RmsNorm final : public Op {
 public:
  // Throws InvalidArgument unless eps is finite and not negative.
  explicit RmsNorm(const kernels::RmsNormAttrs& attrs);

  std::string_view name() const override { return "rms_norm"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override {
    return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}, {Saved::Kind::extra, 0}};
  }
  std::vector<TensorType> extra_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeight };
  kernels::RmsNormAttrs attrs_;
};

}  // namespace eadem::ops
