// SPDX-License-Identifier: Apache-2.0
//
// y = x weight^T + bias + residual: the residual is added where the product would be stored. Ports, dtypes:
// kernels/fusions.h. Inference only. y may be written over the residual.
//
// Between tensor-parallel ranks an all_reduce stands before the addition, so the pattern does not match there.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& linear_add();

class LinearAdd final : public FusedOp {
 public:
  explicit LinearAdd(const kernels::LinearAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override { return {{"y"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text(); }
  int inference_alias(int /*output*/) const override { return 3; }  // residual
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::LinearAttrs attrs_;
};

}  // namespace eadem::fusions
