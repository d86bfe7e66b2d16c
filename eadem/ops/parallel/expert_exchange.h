// SPDX-License-Identifier: Apache-2.0
//
// Rows go to the ranks of their experts, and come back. Ports, the order of rows and gradients:
// kernels/expert_exchange.h. On one rank neither changes anything.
//
// Sharding over the axis: rows and offsets of this rank's tokens are whole, though each rank may have tokens of its
// own; those of its experts are divided along 0. `wire_bytes` is what one rank sends where experts are chosen alike.
#pragma once

#include "eadem/kernels/expert_exchange.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

using kernels::rank_tokens;

class ExpertExchange : public Op {
 public:
  std::string_view name() const override { return name_; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::optional<MeshAxis> crosses() const override { return attrs_.over; }
  int inference_alias(int /*output*/) const override { return -1; }
  // Ranks that have the same tokens only serve.
  bool has_backward() const override { return !attrs_.same_tokens; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  // Rows that a token has on this rank, where experts are chosen alike.
  double rows_per_token() const {
    return static_cast<double>(attrs_.top_k * attrs_.own_experts().size) / static_cast<double>(attrs_.experts);
  }
  virtual double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const = 0;

 protected:
  // Throws InvalidArgument unless every rank has an expert and top_k is positive.
  ExpertExchange(std::string_view name, const kernels::ExpertExchangeAttrs& attrs);
  // The pairs of a token and one of its experts, and the rows that this rank's experts may get.
  Dim pairs() const { return attrs_.top_k * Dim(Symbol::tokens); }
  Dim places() const;
  void expect_offsets(const TensorType& offsets) const;
  TensorType counts_type() const { return TensorType(DType::i32, {int64_t{attrs_.ranks}, attrs_.most_experts()}); }

  std::string_view name_;
  kernels::ExpertExchangeAttrs attrs_;
};

class ExpertDispatch final : public ExpertExchange {
 public:
  explicit ExpertDispatch(const kernels::ExpertExchangeAttrs& attrs) : ExpertExchange("expert_dispatch", attrs) {}

  std::vector<Port> inputs() const override { return {{"x"}, {"offsets", Port::Role::index}}; }
  std::vector<Port> outputs() const override {
    return {{"y"}, {"own", Port::Role::index}, {"counts", Port::Role::index}};
  }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 1}, {Saved::Kind::output, 2}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
  static std::vector<Workload> workloads();
};

class ExpertCombine final : public ExpertExchange {
 public:
  explicit ExpertCombine(const kernels::ExpertExchangeAttrs& attrs) : ExpertExchange("expert_combine", attrs) {}

  std::vector<Port> inputs() const override {
    return {{"x"}, {"offsets", Port::Role::index}, {"counts", Port::Role::index}};
  }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 1}, {Saved::Kind::input, 2}}; }
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
  static std::vector<Workload> workloads();
};

}  // namespace eadem::ops
