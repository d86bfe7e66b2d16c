// SPDX-License-Identifier: Apache-2.0
//
// The experts of each token and their weights, from a router's logits. Ports, dtypes, ties and gradients:
// kernels/experts.h.
//
// Sharding: every rank sees the logits of all experts and makes the same choice.
#pragma once

#include "eadem/kernels/experts.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Route final : public Op {
 public:
  // Throws InvalidArgument unless top_k is positive, epsilon and least_sum are numbers from 0 on, scale is finite,
  // top_groups of groups can be chosen, and with by_token there are no groups and scores are no softmax.
  explicit Route(const kernels::RouteAttrs& attrs);

  std::string_view name() const override { return "route"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"experts", Port::Role::index}, {"weights"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // Logits in f32, whatever the dtype of activations.
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 0}, {Saved::Kind::output, 0}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  std::vector<double> scores(const double* logits, size_t experts) const;
  // The chosen experts of a row, the best first.
  std::vector<size_t> choose(const std::vector<double>& preference) const;
  std::vector<bool> chosen_groups(const std::vector<double>& preference) const;
  // The divisor of the chosen scores' sum.
  double divisor(double sum) const;
  void reference_backward(std::span<const RefTensor> inputs, RefTensor& dlogits) const;

  kernels::RouteAttrs attrs_;
};

}  // namespace eadem::ops
