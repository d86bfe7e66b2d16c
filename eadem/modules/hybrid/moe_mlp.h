// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/build_context.h"
#include "eadem/ops/elementwise.h"
#include "eadem/ops/experts/route.h"

namespace eadem::modules {

// A mixture of experts in the place of an MLP: the router gives each token `route.top_k` of the experts, and
//   y = sum over them of weight * down_proj(f(gate_proj(x)) * up_proj(x)).
// Parameters: gate.weight [experts, hidden], the router, which stays f32; experts.gate_proj.weight and
// experts.up_proj.weight [experts, ffn, hidden], experts.down_proj.weight [experts, hidden, ffn].
class MoeMlp {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t ffn = 0;  // of one expert
    int64_t experts = 0;
    kernels::RouteAttrs route;
    kernels::ActivationKind activation = kernels::ActivationKind::silu;
  };

  MoeMlp(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  // Which experts compute a token, and what each weighs: [tokens, top_k] each.
  struct Routed {
    ValueId experts, weights;
  };
  Routed build_router(BuildContext& context, ValueId x) const;
  // The experts, on rows that stand in the order of their experts.
  ValueId build_experts(BuildContext& context, ValueId rows, ValueId offsets) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
