// SPDX-License-Identifier: Apache-2.0
//
// FusedOp: an op that computes what a fusion's pattern computes. Types, sharding, wanted dtypes and flops are derived
// by walking the pattern through the rules of its parts, so that they are stated once, in the parts. Traffic is that of
// the fused op's own ports.
#pragma once

#include <functional>

#include "eadem/fusions/fusion.h"

namespace eadem::fusions {

class FusedOp : public ops::Op {
 public:
  std::string_view name() const override { return fusion_.name; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  // The cost of the forward and inference passes.
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;

 protected:
  // `fusion` outlives the op. `parts`: one op per node of its pattern, in the same order.
  FusedOp(const Fusion& fusion, std::vector<ops::OpPtr> parts);

  const ops::Op& part(size_t node) const { return *parts_[node]; }
  // The cost of the parts in the inference pass as separate ops: the values between them count as traffic.
  ops::Cost parts_cost(std::span<const TensorType> inputs, const SymbolValues& symbols) const;
  // Bytes that the parts as separate ops move and the fused op does not: of the values between them, and of inputs that
  // more than one of them reads. States are left out: parts count the rows of a state that they use, which the fused op
  // uses too.
  double saved_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const;

 private:
  using Types = std::vector<TensorType>;
  // A part's output types from its input types.
  using Rule = std::function<Types(size_t node, const Types& inputs)>;

  // The types of all pattern values, from those of the fused op's inputs, part by part.
  Types walk(std::span<const TensorType> inputs, const Rule& rule) const;
  static Types types_of(const Types& values, const std::vector<int>& ids);

  const Fusion& fusion_;
  std::vector<ops::OpPtr> parts_;
  size_t num_values_ = 0;
};

// Zeros of a shape, in which references keep a value between two parts.
ops::RefTensor ref_zeros(const Shape& shape);

}  // namespace eadem::fusions
