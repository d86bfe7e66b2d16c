// SPDX-License-Identifier: Apache-2.0
//
// Draws one token per row of logits: biases, penalties, masks, temperature, filters, counter-based randomness. Gives
// its log-probability and those of the likeliest tokens. Ports and the order of the steps: kernels/sample.h. Inference
// only. Every rank draws every row from whole logits, and so the same token: where ranks divide the vocabulary the
// logits of the rows that are drawn are gathered first.
#pragma once

#include "eadem/kernels/sample.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Sample final : public Op {
 public:
  std::string_view name() const override { return "sample"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  // Probabilities in double, the draw exactly as the kernels take it. A failed row gives token -1 and logprob NaN.
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
