// SPDX-License-Identifier: Apache-2.0
//
// Causal attention of packed sequences over their own keys and values (direct) or over a cache (cached). Ports, math
// and gradients: kernels/attention/attention.h. Only direct attention has a backward pass.
//
// Sharding: q, k, v and y along the heads (axis 1, of the caches too), or q and y alone if there is one head of keys;
// sinks along their axis 0. heads and kv_heads are those of the part.
//
// Cost assumes that the step's tokens are divided evenly over its sequences and that, with a cache, every sequence
// fills max_blocks blocks; it counts the keys and values that are attended to, not the whole cache.
#pragma once

#include "eadem/kernels/attention/attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Attention final : public Op {
 public:
  // Throws InvalidArgument unless heads is a positive multiple of kv_heads, head_dim > 0, window and chunk >= 0 and not
  // both above, scale finite, and softcap finite and >= 0.
  explicit Attention(const kernels::AttentionAttrs& attrs);

  std::string_view name() const override { return "attention"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
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
  enum In { kQ, kK, kV, kQueryStart, kKvLength, kBlockTable, kSinks };
  kernels::AttentionAttrs attrs_;
};

}  // namespace eadem::ops
