// SPDX-License-Identifier: Apache-2.0
//
// Products over virtual shards: x cut at the borders of the shards, and the sum of what each shard's product gave, with
// the same bits for each number of ranks. Ports and the order of the sum: kernels/virtual_shards.h.
#pragma once

#include <string>
#include <vector>

#include "eadem/kernels/virtual_shards.h"
#include "eadem/ops/parallel/collectives.h"

namespace eadem::ops {

// Sharding: x whole, or divided along any axis; so are the outputs.
class CutColumns final : public Op {
 public:
  // Throws InvalidArgument unless there are at least two widths, all of them positive.
  explicit CutColumns(const kernels::CutColumnsAttrs& attrs);

  std::string_view name() const override { return "cut_columns"; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  std::vector<std::string> port_names_;  // "y0", "y1", …
  kernels::CutColumnsAttrs attrs_;
};

// Sharding: with several ranks the inputs are partial sums, else whole; the output is whole.
class ShardSum final : public Collective {
 public:
  // Throws InvalidArgument unless the ranks own all shards of the tree, in order and each at least one.
  explicit ShardSum(const kernels::ShardSumAttrs& attrs);

  std::vector<Port> inputs() const override;
  AttrsRef attrs() const override { return AttrsRef(sum_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  // The reference is that of one rank, which has all shards.
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
  static std::vector<Workload> workloads();

 private:
  std::vector<std::string> port_names_;  // "partial0", "partial1", …
  kernels::ShardSumAttrs sum_;
};

}  // namespace eadem::ops
