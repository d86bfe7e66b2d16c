// SPDX-License-Identifier: Apache-2.0
//
// Attention over the compressed keys that a token sees. Ports, math and gradients:
// kernels/attention/compressed_attention.h. Only direct attention has a backward pass.
//
// Sharding: q, k, v and y along the heads (axis 1). heads and kv_heads are those of the part.
//
// Cost assumes that the step's tokens are divided evenly over its sequences and that, with a cache, every sequence
// fills max_blocks blocks; it counts the rows that are read, not the whole cache.
#pragma once

#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/ops/attention/selected_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

// Type and sharding rules that compressed_attention and select_blocks share: of q, and of compressed keys or values.
void expect_queries(std::string_view op, const TensorType& q, int64_t heads, int64_t head_dim);
void expect_rows_like(const Op& op, std::span<const TensorType> inputs, size_t port, kernels::KvSource source,
                      int64_t kv_heads, int64_t width, std::string_view because);
Sharding expect_divided_heads(const Op& op, std::span<const TensorType> inputs, size_t rows_end);
// Pairs of a query of the step and a compressed row that it sees.
double compressed_pairs(const kernels::RowGrid& grid, const TensorType& k, const TensorType& kv_length, int64_t tokens,
                        const SymbolValues& symbols);

class CompressedAttention final : public Op {
 public:
  // Throws InvalidArgument unless heads is a positive multiple of kv_heads, head_dim and value_dim are positive, scale
  // is finite, and the length of a row a positive multiple of its stride.
  explicit CompressedAttention(const kernels::CompressedAttentionAttrs& attrs);

  std::string_view name() const override { return "compressed_attention"; }
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

  // The definition: selected_attention over the rows that each token sees, and the inputs of one of its passes.
  SelectedAttention as_selected() const;
  std::vector<RefTensor> selected_inputs(std::span<const RefTensor> inputs) const;

 private:
  enum In { kQ, kK, kV, kQueryStart, kKvLength, kBlockTable };

  kernels::CompressedAttentionAttrs attrs_;
};

}  // namespace eadem::ops
