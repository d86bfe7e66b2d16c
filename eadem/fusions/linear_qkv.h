// SPDX-License-Identifier: Apache-2.0
//
// q, k, v = three linears of one x, in one launch. Ports, dtypes: kernels/fusions.h. Inference only.
#pragma once

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/fusions.h"

namespace eadem::fusions {

const Fusion& linear_qkv();

class LinearQkv final : public FusedOp {
 public:
  explicit LinearQkv(const kernels::LinearAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override { return {{"q"}, {"k"}, {"v"}}; }
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override { return part(0).attrs_text(); }
  int inference_alias(int /*output*/) const override { return -1; }
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::LinearAttrs attrs_;
};

}  // namespace eadem::fusions
