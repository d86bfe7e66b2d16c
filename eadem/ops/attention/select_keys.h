// SPDX-License-Identifier: Apache-2.0
//
// The positions that a token attends to, by an indexer's scores. Ports, math and ties:
// kernels/attention/selected_attention.h. Training takes the choice as it is: nothing has a gradient through it.
//
// Sharding: none; every rank makes the same choice. Cost counts the index keys that are read, not the whole cache.
#pragma once

#include "eadem/kernels/attention/selected_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class SelectKeys final : public Op {
 public:
  // Throws InvalidArgument unless heads, head_dim, top_k and stride are positive and scale is positive and
  // finite.
  explicit SelectKeys(const kernels::SelectKeysAttrs& attrs);

  std::string_view name() const override { return "select_keys"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"selection", Port::Role::index}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kQ, kK, kWeights, kQueryStart, kKvLength, kBlockTable };
  kernels::SelectKeysAttrs attrs_;
};

}  // namespace eadem::ops
