// SPDX-License-Identifier: Apache-2.0
//
// y = x under another shape of as many elements: [tokens, heads * head_dim] as [tokens, heads, head_dim] and back, or
// [tokens, k * width] as [k * tokens, width]. The first dimension may be symbolic; the others are fixed. Moves no bytes
// in any pass.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class Reshape final : public Op {
 public:
  // `trailing`: the dimensions of y after the first, which is kept.
  explicit Reshape(std::vector<int64_t> trailing) : trailing_(std::move(trailing)) {}
  // `rows`: the first dimension of y.
  Reshape(Dim rows, std::vector<int64_t> trailing) : rows_(rows), trailing_(std::move(trailing)) {}

  std::string_view name() const override { return "reshape"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return {}; }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int) const override { return 0; }
  bool is_view() const override { return true; }
  bool has_backward() const override { return true; }
  Cost cost(Pass, std::span<const TensorType>, std::span<const TensorType>, const SymbolValues&) const override {
    return {};
  }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;

 private:
  std::optional<Dim> rows_;  // nothing: the first dimension of x
  std::vector<int64_t> trailing_;
};

}  // namespace eadem::ops
