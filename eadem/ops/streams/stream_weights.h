// SPDX-License-Identifier: Apache-2.0
//
// The weights by which hyper-connections read and mix their streams. Ports, math and gradients: kernels/streams.h.
//
// Sharding: none; every rank computes the weights of every token.
#pragma once

#include "eadem/kernels/streams.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class StreamWeights final : public Op {
 public:
  // Throws InvalidArgument unless there are 1 to 64 streams and 1 to 1000 iterations and eps is a number from 0 on.
  explicit StreamWeights(const kernels::StreamWeightsAttrs& attrs);

  std::string_view name() const override { return "stream_weights"; }
  std::vector<Port> inputs() const override {
    return {{"logits"}, {"base", Port::Role::parameter}, {"scale", Port::Role::parameter}};
  }
  std::vector<Port> outputs() const override { return {{"weights"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // In f32, whatever the dtype of activations.
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override {
    return {{Saved::Kind::input, kLogits}, {Saved::Kind::input, kBase}, {Saved::Kind::input, kScale}};
  }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kLogits, kBase, kScale };
  void reference_backward(std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const;

  kernels::StreamWeightsAttrs attrs_;
};

// comb after each division of its rows or columns, and the divisors of each: what its gradient needs. The first of
// `states` is that before any division.
struct MixingSteps {
  std::vector<std::vector<double>> states, divisors;

  // Whether division `k`, the first of which is 0, is that of columns.
  static bool divides_columns(size_t k) { return k % 2 == 0; }
};
// `logits` are scale * logits + base.
MixingSteps mixing_steps(const kernels::StreamWeightsAttrs& attrs, std::span<const double> logits);

}  // namespace eadem::ops
