// SPDX-License-Identifier: Apache-2.0
//
// The loss where the ranks divide the vocabulary: each makes a state of 12 bytes a row (softmax_state), these are
// gathered, and each rank finishes the loss and the gradient of its own logits. Ports and math:
// kernels/training/parallel_cross_entropy.h. Source: Shoeybi et al. 2019, section 3, with one exchange instead of
// three.
#pragma once

#include "eadem/kernels/training/parallel_cross_entropy.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class SoftmaxState final : public Op {
 public:
  explicit SoftmaxState(const kernels::VocabularyPart& part) : part_(part) {}

  std::string_view name() const override { return "softmax_state"; }
  std::vector<Port> inputs() const override {
    return {{"logits", Port::Role::constant}, {"labels", Port::Role::index}};
  }
  std::vector<Port> outputs() const override { return {{"state", Port::Role::constant}}; }
  AttrsRef attrs() const override { return AttrsRef(part_); }
  std::string attrs_text() const override { return fmt::format("first={}", part_.first); }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  kernels::VocabularyPart part_;
};

class ParallelCrossEntropy final : public Op {
 public:
  ParallelCrossEntropy(const kernels::VocabularyPart& part, int ranks) : part_(part), ranks_(ranks) {}

  std::string_view name() const override { return "parallel_cross_entropy"; }
  std::vector<Port> inputs() const override {
    return {{"logits"}, {"labels", Port::Role::index}, {"states", Port::Role::constant}};
  }
  std::vector<Port> outputs() const override { return {{"loss"}}; }
  AttrsRef attrs() const override { return AttrsRef(part_); }
  std::string attrs_text() const override { return fmt::format("first={}", part_.first); }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
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
  kernels::VocabularyPart part_;
  int ranks_;
};

}  // namespace eadem::ops
