// SPDX-License-Identifier: Apache-2.0
//
// Keys are rotated on their way into the cache, values written beside them; the rotated keys are stored nowhere else.
// Ports, dtypes: kernels/attention/kv_append.h. Inference only; the outputs are the caches themselves.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/attention/kv_append.h"

namespace eadem::fusions {

const Fusion& rope_kv_append();

class RopeKvAppend final : public FusedOp {
 public:
  explicit RopeKvAppend(const kernels::RopeKvAppendAttrs& attrs);

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
