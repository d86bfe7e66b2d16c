// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "eadem/modules/build_context.h"
#include "eadem/ops/experts/route.h"

namespace eadem::modules {

// The router of a mixture of experts: which `route.top_k` of them compute a token, and what each weighs
// (kernels/experts.h). Where route.groups > 1 it chooses groups first, what others call GroupTopK. Parameters, which
// stay f32, since a rounded router would choose other experts: gate.weight [choices, hidden], gate.bias [choices],
// gate.e_score_correction_bias [choices], added to scores for the choice alone, gate.scale [hidden], the weight of a
// norm of the input, per_expert_scale [choices], and gate.tid2eid [token_table, top_k], whole numbers, the experts of
// each token where they are not chosen.
class SelectTopk {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t choices = 0;
    kernels::RouteAttrs route;
    bool bias = false;             // added to the logits
    bool correction_bias = false;  // added to the scores, for the choice alone
    // The input's root mean square norm, with weights gate.scale / sqrt(hidden). None: the input as it is.
    std::optional<double> norm_eps;
    bool scales = false;      // the weight of an expert is times its per_expert_scale
    int64_t token_table = 0;  // with route.by_token: tokens that have experts, the rows of gate.tid2eid
  };
  struct Chosen {
    ValueId experts, weights;  // [tokens, top_k] each
  };

  explicit SelectTopk(const Config& config) : config_(config) {}

  // x [tokens, hidden]
  Chosen build(BuildContext& context, ValueId x) const;

 private:
  ValueId build_norm(BuildContext& context, ValueId x) const;

  Config config_;
};

}  // namespace eadem::modules
