// SPDX-License-Identifier: Apache-2.0
//
// Queries are rotated, keys on their way into the cache, and the queries attend to the cache at once: rope_qk_append,
// and the attention that reads its results. For decode steps of few sequences, where each is the work of some
// microseconds. rope_append_attention_quantize writes the result rounded, because only products read it. Ports, dtypes:
// kernels/attention/append_attention.h. Inference only.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/attention/append_attention.h"

namespace eadem::fusions {

const Fusion& rope_append_attention();
const Fusion& rope_append_attention_quantize();

class RopeAppendAttention final : public FusedOp {
 public:
  explicit RopeAppendAttention(const kernels::RopeAppendAttentionAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override;
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override;
  // Counts the slots that are written and the keys and values that are attended to, not the caches.
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::RopeAppendAttentionAttrs attrs_;
};

class RopeAppendAttentionQuantize final : public FusedOp {
 public:
  explicit RopeAppendAttentionQuantize(const kernels::RopeAppendAttentionAttrs& attrs);

  std::vector<ops::Port> inputs() const override { return part(0).inputs(); }
  std::vector<ops::Port> outputs() const override { return part(0).outputs(); }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text() + " " + part(2).attrs_text(); }
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::RopeAppendAttentionAttrs attrs_;
};

}  // namespace eadem::fusions
