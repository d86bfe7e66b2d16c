// SPDX-License-Identifier: Apache-2.0
//
// The definition of the gated delta rule in double precision, and the quantities it goes through; error bounds of tests
// read them, too.
#pragma once

#include <vector>

#include "eadem/kernels/recurrent/gated_delta_rule.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

// What one token brings to one value head.
struct DeltaToken {
  std::vector<double> q, k, decay;          // normalized; exp(g) of each row
  std::vector<double> rate;                 // softplus(a + dt_bias) of each row
  double beta = 0, q_size = 0, k_size = 0;  // square roots of sum x^2 + eps
};

DeltaToken delta_token(const kernels::GatedDeltaRuleAttrs& attrs, std::span<const RefTensor> inputs, int64_t token,
                       int64_t head);

// S [key_dim, value_dim], of doubles.
using DeltaState = std::vector<double>;

// What a state keeps of a value head (kernels/recurrent/gated_delta_rule.h), of doubles.
struct DeltaGroupState {
  DeltaState whole;                                    // S before the last group
  std::vector<std::vector<double>> keys, corrections;  // of the tokens of that group
  std::vector<double> fade;                            // F of each row

  // S after the last token.
  DeltaState state() const;
  // A token that made S `state` by the correction d.
  void append(const DeltaToken& token, const std::vector<double>& d, const DeltaState& state);
};

// From and to a value head's part of the state.
DeltaGroupState load_delta_state(const kernels::GatedDeltaRuleAttrs& attrs, const double* kept);
void store_delta_state(const kernels::GatedDeltaRuleAttrs& attrs, const DeltaGroupState& state, double* kept);

// One token: `state` becomes S after it; d and S^T k before it are written [value_dim].
void delta_step(DeltaState& state, const DeltaToken& token, const double* v, std::vector<double>& d,
                std::vector<double>& read);

}  // namespace eadem::ops
