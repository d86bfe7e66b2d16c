// SPDX-License-Identifier: Apache-2.0
//
// What a layer's part reads of the streams of hyper-connections, and the streams behind it. Ports, math and gradients:
// kernels/streams.h.
//
// Sharding: none; every rank has every stream.
#pragma once

#include "eadem/kernels/streams.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class CollapseStreams final : public Op {
 public:
  std::string_view name() const override { return "collapse_streams"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"weights"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, kX}, {Saved::Kind::input, kWeights}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeights };
};

class ExpandStreams final : public Op {
 public:
  std::string_view name() const override { return "expand_streams"; }
  std::vector<Port> inputs() const override { return {{"x"}, {"y"}, {"weights"}}; }
  std::vector<Port> outputs() const override { return {{"z"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override {
    return {{Saved::Kind::input, kX}, {Saved::Kind::input, kY}, {Saved::Kind::input, kWeights}};
  }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kY, kWeights };
  void reference_backward(std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const;
};

}  // namespace eadem::ops
