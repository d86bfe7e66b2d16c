// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "eadem/modules/base/select_topk.h"
#include "eadem/modules/build_context.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/experts/route.h"

namespace eadem::modules {

// A mixture of experts in the place of an MLP: the router gives each token `route.top_k` of the experts, and
//   y = sum over them of weight * down_proj(f(gate_proj(x)) * up_proj(x)) + shared(x),
// without a gate down_proj(f(up_proj(x))); or the weight multiplies what the expert reads, weight * x in the place of
// x. With a latent the experts read fc1_latent_proj(x), and their sum goes through fc2_latent_proj. The router may also
// choose among identities, experts without weights that give x: each adds weight * x. Parameters:
// those of the router (base/select_topk.h), whose choices are experts and then identities; experts.gate_proj.weight and
// experts.up_proj.weight [experts, ffn, hidden], experts.down_proj.weight [experts, hidden, ffn], each with .bias
// [experts, outputs]; those of a DenseMlp below the name of the shared expert, and shared_expert_gate.weight [1,
// hidden]; fc1_latent_proj.weight [latent, hidden] and fc2_latent_proj.weight [hidden, latent], each with .bias, with
// experts of that width.
class MoeMlp {
 public:
  // An expert that computes all tokens.
  struct SharedExpert {
    std::string name;  // its scope: "shared_experts"
    int64_t ffn = 0;
    bool gated = false;  // times the sigmoid of shared_expert_gate(x)
    bool bias = false;   // of all its projections
  };

  struct Config {
    int64_t hidden = 0;
    int64_t ffn = 0;  // of one expert
    int64_t experts = 0;
    int64_t identities = 0;
    kernels::RouteAttrs route;
    kernels::ActivationKind activation = kernels::ActivationKind::silu;
    bool router_bias = false;      // added to the logits
    bool correction_bias = false;  // added to the scores, for the choice alone
    bool expert_bias = false;      // of all three projections
    // In the place of `activation` and a product with up, in the shared expert, too.
    std::optional<kernels::ClampedSwigluAttrs> clamped;
    std::optional<SharedExpert> shared;
    bool gated = true;   // experts have a gate_proj, and the shared one has
    int64_t latent = 0;  // width of what experts read and write; 0: hidden
    bool latent_bias = false;
    bool weighs_input = false;
    // The router reads the root mean square norm of its input, with weights gate.scale / sqrt(hidden). None: the input.
    std::optional<double> router_norm_eps;
    bool expert_scales = false;  // the weight of an expert is times its per_expert_scale
    int64_t token_table = 0;     // with route.by_token: tokens that have experts, the rows of gate.tid2eid

    int64_t choices() const { return experts + identities; }
    int64_t expert_width() const { return latent > 0 ? latent : hidden; }
  };

  MoeMlp(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const { return build(context, x, x); }
  // The router reads another value than the experts.
  ValueId build(BuildContext& context, ValueId x, ValueId router_x) const;

 private:
  SelectTopk::Chosen build_router(BuildContext& context, ValueId x) const;
  // The experts, on rows that stand in the order of their experts.
  ValueId build_experts(BuildContext& context, ValueId rows, ValueId offsets) const;
  ValueId build_shared(BuildContext& context, ValueId x) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
