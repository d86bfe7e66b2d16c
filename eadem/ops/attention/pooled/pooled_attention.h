// SPDX-License-Identifier: Apache-2.0
//
// Attention over a window of keys and pooled rows of all tokens. Ports, math and gradients:
// kernels/attention/pooled_attention.h. Only direct attention has a backward pass.
//
// Sharding: q, sinks and y along the heads (axis 1, 0 and 1); k, rows and the selection are whole. heads are those of
// the part.
//
// Cost assumes that the step's tokens are divided evenly over its sequences and that, with a cache, every sequence
// fills max_blocks blocks; it counts the keys that are read for a token, not the whole cache.
#pragma once

#include "eadem/kernels/attention/pooled_attention.h"
#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class PooledAttention final : public Op {
 public:
  // Throws InvalidArgument unless heads, width, window and stride are positive, selected is not negative and scale is
  // finite.
  explicit PooledAttention(const kernels::PooledAttentionAttrs& attrs);

  std::string_view name() const override { return "pooled_attention"; }
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

  // A key that a token sees: where its values begin among those of the port.
  struct Key {
    int port;  // of k or of rows
    size_t at;
  };
  // Those of a token, in order. `inputs` are those of the pass.
  std::vector<Key> keys_of(Pass pass, std::span<const RefTensor> inputs, const RefSequence& sequence,
                           int64_t token) const;

 private:
  enum In { kQ, kK, kRows, kSinks, kQueryStart, kKvLength, kBlockTable, kRowsTable };
  // Behind the ports that describe sequences. The backward pass has no tables.
  int selection_port(Pass pass) const {
    if (pass == Pass::backward) return kBlockTable;
    return attrs_.source == kernels::KvSource::cached ? kRowsTable + 1 : kRowsTable;
  }

  kernels::PooledAttentionAttrs attrs_;
};

}  // namespace eadem::ops
