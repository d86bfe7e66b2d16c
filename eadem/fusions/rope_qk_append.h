// SPDX-License-Identifier: Apache-2.0
//
// Queries are rotated, and keys on their way into the cache, with the values beside them: rope_kv_append, and the rope
// of the queries by the same table. Ports, dtypes: kernels/attention/kv_append.h. Inference only.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/attention/kv_append.h"

namespace eadem::fusions {

const Fusion& rope_qk_append();

class RopeQkAppend final : public FusedOp {
 public:
  explicit RopeQkAppend(const kernels::RopeKvAppendAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override;
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text(); }
  // Counts the slots that are written, not the caches.
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::RopeKvAppendAttrs attrs_;
};

}  // namespace eadem::fusions
