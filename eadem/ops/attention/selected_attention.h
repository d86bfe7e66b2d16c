// SPDX-License-Identifier: Apache-2.0
//
// Causal attention over the keys that are selected for each token. Ports, math and gradients:
// kernels/attention/selected_attention.h. Only direct attention has a backward pass.
//
// Sharding: q, k, v, selection and y along the heads (axis 1), or q and y alone if there is one head of keys. heads and
// kv_heads are those of the part.
//
// Cost assumes that every token has as many keys as its selection has room for, and counts the rows that are read for
// it, not the whole cache.
#pragma once

#include "eadem/kernels/attention/selected_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class SelectedAttention final : public Op {
 public:
  // Throws InvalidArgument unless heads is a positive multiple of kv_heads, head_dim, value_dim and span are positive
  // and scale is finite.
  explicit SelectedAttention(const kernels::SelectedAttentionAttrs& attrs);

  std::string_view name() const override { return "selected_attention"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  bool has_backward() const override { return attrs_.source == kernels::KvSource::direct; }
  std::vector<Saved> saved() const override;
  std::vector<TensorType> extra_types(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kQ, kK, kV, kSelection, kQueryStart, kKvLength, kBlockTable };
  struct Row;
  void reference_row(const Row& row, const RefTensor& v, std::span<RefTensor> out) const;
  void reference_gradients(const Row& row, std::span<const RefTensor> in, std::span<RefTensor> out) const;

  kernels::SelectedAttentionAttrs attrs_;
};

}  // namespace eadem::ops
