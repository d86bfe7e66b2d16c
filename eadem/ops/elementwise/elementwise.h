// SPDX-License-Identifier: Apache-2.0
//
// add: y = a + b.   mul: y = a * b.   scale: y = factor * x, with or without a soft cap.
// activation: y = f(x).   gated_activation: y = f(gate) * up.   cast: y = x.
// Ports, dtypes and gradients: kernels/elementwise.h. All operands have one shape and one sharding.
#pragma once

#include "eadem/kernels/elementwise.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

// "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"
std::string_view activation_name(kernels::ActivationKind kind);

// The common base of six ops: operands of one shape; at inference the result may be written over the first.
class ElementwiseOp : public Op {
 public:
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // Operands follow the first: f32 stays, bf16 stays, f16 becomes f32.
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;

 protected:
  // Floating-point operations per element; a transcendental function counts as kTranscendentalFlops.
  static constexpr double kTranscendentalFlops = 10;
  virtual double flops_per_element(Pass pass) const = 0;
};

class Add final : public ElementwiseOp {
 public:
  std::string_view name() const override { return "add"; }
  std::vector<Port> inputs() const override { return {{"a"}, {"b"}}; }
  bool passes_gradient_through() const override { return true; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass pass) const override { return pass == Pass::backward ? 0 : 1; }
};

class Mul final : public ElementwiseOp {
 public:
  std::string_view name() const override { return "mul"; }
  std::vector<Port> inputs() const override { return {{"a"}, {"b"}}; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass pass) const override { return pass == Pass::backward ? 2 : 1; }
};

class Scale final : public ElementwiseOp {
 public:
  // Throws InvalidArgument unless all attributes are finite, softcap and limit >= 0, and one of these 0.
  explicit Scale(const kernels::ScaleAttrs& attrs);

  std::string_view name() const override { return "scale"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass pass) const override;

 private:
  kernels::ScaleAttrs attrs_;
};

class Activation final : public ElementwiseOp {
 public:
  explicit Activation(const kernels::ActivationAttrs& attrs) : attrs_(attrs) {}

  std::string_view name() const override { return "activation"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass pass) const override;

 private:
  kernels::ActivationAttrs attrs_;
};

class GatedActivation final : public ElementwiseOp {
 public:
  explicit GatedActivation(const kernels::ActivationAttrs& attrs) : attrs_(attrs) {}

  std::string_view name() const override { return "gated_activation"; }
  std::vector<Port> inputs() const override { return {{"gate"}, {"up"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}, {Saved::Kind::input, 1}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass pass) const override;

 private:
  kernels::ActivationAttrs attrs_;
};

class Cast final : public ElementwiseOp {
 public:
  // Throws InvalidArgument unless `to` is f32, bf16 or f16.
  explicit Cast(const kernels::CastAttrs& attrs);

  std::string_view name() const override { return "cast"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  // Element sizes differ, so the result needs a place of its own.
  int inference_alias(int /*output*/) const override { return -1; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 protected:
  double flops_per_element(Pass /*pass*/) const override { return 0; }

 private:
  kernels::CastAttrs attrs_;
};

}  // namespace eadem::ops
