// SPDX-License-Identifier: Apache-2.0
//
// y[t, :] = table[ids[t], :]. Ports, dtypes and gradients: kernels/embedding.h.
//
// The table is whole on every rank, or divided along its rows; y is then a partial sum. Cost counts the rows that are
// read, not the table.
#pragma once

#include "eadem/kernels/embedding.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Embedding final : public Op {
 public:
  // Throws InvalidArgument unless out_dtype is a 16- or 32-bit float and vocab > 0.
  explicit Embedding(const kernels::EmbeddingAttrs& attrs);

  std::string_view name() const override { return "embedding"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return true; }
  std::vector<Saved> saved() const override { return {{Saved::Kind::input, 1}}; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kTable, kIds };
  kernels::EmbeddingAttrs attrs_;
};

}  // namespace eadem::ops
