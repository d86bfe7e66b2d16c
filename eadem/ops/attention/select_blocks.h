// SPDX-License-Identifier: Apache-2.0
//
// The blocks of positions that a token attends to, by its weights over the compressed keys. Ports, math and ties:
// kernels/attention/compressed_attention.h. Training takes the choice as it is: nothing has a gradient through it.
//
// Sharding: q, k and the selection along the heads (axis 1). heads and kv_heads are those of the part.
//
// Cost as that of compressed_attention, without values.
#pragma once

#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class SelectBlocks final : public Op {
 public:
  // Throws InvalidArgument unless heads is a positive multiple of kv_heads, head_dim is positive, scale is finite, the
  // length of a row a positive multiple of its stride, span one as well, first_blocks >= 0, local_blocks >= 1, and
  // top_n no less than both together.
  explicit SelectBlocks(const kernels::SelectBlocksAttrs& attrs);

  std::string_view name() const override { return "select_blocks"; }
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
  enum In { kQ, kK, kQueryStart, kKvLength, kBlockTable };

  kernels::SelectBlocksAttrs attrs_;
};

}  // namespace eadem::ops
