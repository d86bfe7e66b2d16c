// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/base/norm.h"
#include "eadem/modules/hybrid/dense_mlp.h"
#include "eadem/modules/hybrid/moe_mlp.h"

namespace eadem::modules {

// An MLP and experts side by side, each with norms of its own; the router reads what is not normalized:
//   y = after_dense(mlp(before_dense(x))) + after_experts(experts(before_experts(x), routed by x)).
// Parameters: those of the norms, of the MLP below "mlp" and of the experts below "moe".
class DenseAndExperts {
 public:
  struct Config {
    DenseMlp::Config dense;
    MoeMlp::Config experts;
    NormSpec before_dense, after_dense, before_experts, after_experts;
  };

  DenseAndExperts(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  const Config& config_;
  int layer_;
};

}  // namespace eadem::modules
