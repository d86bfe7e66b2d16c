// SPDX-License-Identifier: Apache-2.0
//
// Keys of windows of tokens, pooled into one each. Ports, math and gradients: kernels/attention/pooled_attention.h.
// Only direct keys have a backward pass.
//
// Sharding: none; every rank has every row.
//
// Cost assumes that the step's tokens are divided evenly over its sequences, and counts the keys that are read, not the
// whole cache.
#pragma once

#include "eadem/kernels/attention/pooled_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class PoolKeys final : public Op {
 public:
  // Throws InvalidArgument unless width and stride are positive and parts is 1 or 2.
  explicit PoolKeys(const kernels::PoolKeysAttrs& attrs);

  std::string_view name() const override { return "pool_keys"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"z"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return attrs_.source == kernels::KvSource::direct; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kGate, kPosition, kQueryStart, kKvLength, kBlockTable, kSlots };

  kernels::PoolKeysAttrs attrs_;
};

// What makes a pooled row: a position, counted from the beginning of its sequence, and the part's first column.
struct PooledTerm {
  int64_t position, column;
};
// Those of the row whose last token is at `last`, in the order of the sum.
std::vector<PooledTerm> pooled_terms(const kernels::PoolKeysAttrs& attrs, int64_t last);

}  // namespace eadem::ops
