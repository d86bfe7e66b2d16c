// SPDX-License-Identifier: Apache-2.0
//
// Mixtures of experts: a token is computed by `top_k` of the experts of a layer and is the weighted sum of what they
// make of it. Five ops do it; between them rows stand in the order of their experts, so that those of one expert are
// neighbours:
//
//   experts, weights = route(logits)
//   rows, offsets    = expert_order(experts)
//   y                = unpermute(grouped_linear(… permute(x, rows) …, offsets), rows, weights)
//
// Where the weight multiplies what an expert reads, permute has the weights and unpermute has none. Three more are the
// parts of some models: clamped_swiglu of their experts, gate_rows of an expert that all tokens share, and
// identity_experts of experts without weights, which give back what they read.
// load_balancing_loss is what training adds so that all experts are used.
//
// route: the experts of each token and their weights.
//   inputs   logits [tokens, experts] f32; bias [experts] f32 (constant, optional). With `by_token` also table [vocab,
//            top_k] f32 (constant), of numbers of experts, and token_ids [tokens] i32, of [0, vocab).
//   outputs  experts [tokens, top_k] i32, without repetition, the best first; weights [tokens, top_k] f32.
//   backward inputs: logits, experts, dweights.  outputs: dlogits. The choice counts as constant.
//   score = softmax of the token's logits, or of each logit its sigmoid or sqrt(softplus). Experts are chosen by their
//   logits or, with a bias or groups, by score + bias; of equals the lower number comes first. With groups, experts
//   stand in `groups` groups of neighbours; a group is worth the sum of its `group_best` best choices, and only experts
//   of the `top_groups` best groups are chosen. A weight is the expert's score without bias, with `renormalize` divided
//   by max(least_sum, sum + epsilon), the sum being that of the chosen scores in the order of the choice; then times
//   `scale`. A softmax over the chosen logits alone is the softmax over all, renormalized. With `by_token` nothing is
//   chosen: a token's experts are those of its row of the table, in its order, and may repeat; a number outside of [0,
//   experts) counts as the nearest one inside. Scores are then no softmax.
//
// expert_order: sorts the pairs of a token and one of its experts by expert; pairs of one expert stay in the order of
//   tokens, and of a token's experts.
//   inputs   experts [tokens, top_k] i32, of [0, experts + identities).
//   outputs  rows [tokens, top_k] i32: where each pair stands; offsets [experts + 1] i32: the pairs of expert e stand
//            at [offsets[e], offsets[e + 1]). No gradient. Those of identities stand behind offsets[experts], in the
//            order of tokens, whichever identity it is.
//
// permute: y[rows[t, j], :] = x[t, :], or weighted, weights[t, j] * x[t, :]
//   inputs   x [tokens, hidden] f32 or bf16; rows [tokens, top_k] i32, a permutation; weighted also weights [tokens,
//            top_k] f32.
//   outputs  y [top_k * tokens, hidden], dtype of x.
//   backward inputs: rows, dy.  outputs: dx[t, :] = sum over j, in order, of dy[rows[t, j], :], in f32.
//   weighted inputs: x, rows, weights, dy.  outputs: dx[t, :] = sum over j of weights[t, j] * dy[rows[t, j], :];
//            dweights[t, j] = x[t, :] . dy[rows[t, j], :].
//
// grouped_linear: y[r, :] = weight[e] x[r, :] + bias[e, :] for the rows r of each expert e.
//   inputs   x [rows, in] f32 or bf16; weight [experts, out, in] f32, bf16 or f16 (parameter); offsets [experts + 1]
//            i32; bias [experts, out] f32, bf16 or f16 (parameter, optional).
//   outputs  y [rows, out] in out_dtype. Rows of no expert, behind offsets[experts], are 0, and so is their dx.
//   backward inputs: x, weight, offsets, dy.  outputs: dx [rows, in] =, dweight [experts, out, in] f32 +=, dbias
//            [experts, out] f32 +=.
//   Accumulates in f32. A row's terms are added in the order that linear has for a matrix in the same format: the
//   result does not depend on the other rows, on their number or on the thread count.
//
// unpermute: y[t, :] = sum over j of weights[t, j] * x[rows[t, j], :], or of x[rows[t, j], :] if not weighted
//   inputs   x [top_k * tokens, hidden] f32 or bf16; rows [tokens, top_k] i32, a permutation; weighted also weights
//            [tokens, top_k] f32.
//   outputs  y [tokens, hidden], dtype of x. Adds in f32, in the order of j, whatever the order of the rows.
//   backward inputs: x, rows, weights, dy.  outputs: dx[rows[t, j], :] = weights[t, j] * dy[t, :];
//            dweights[t, j] = dy[t, :] . x[rows[t, j], :]. If not weighted, inputs: rows, dy.  outputs: dx.
//
// clamped_swiglu: y = (clamp(up, -limit, limit) + offset) * g / (1 + exp(-alpha g)), g = min(gate, limit)
//   inputs   gate, up [rows, width] f32.  outputs: y [rows, width] f32; inference may write it over gate.
//   backward inputs: gate, up, dy.  outputs: dgate, dup; 0 where the limit holds a value, and as without a limit where
//            a value is the limit.
//   Source: transformers, models/gpt_oss.
//
// gate_rows: y[t, i] = x[t, i] / (1 + exp(-gate[t, i / (hidden / gates)])): each gate has as many neighbouring columns,
// such as those of a head.
//   inputs   x [tokens, hidden] f32; gate [tokens, gates] f32, hidden a multiple of gates.  outputs: y [tokens, hidden]
//            f32; inference may write it over x.
//   backward inputs: x, gate, dy.  outputs: dx, dgate.
//
// identity_experts: y[t, :] = share[t] * x[t, :], share[t] = sum of weights[t, j] over the j, in order, with
//   experts[t, j] >= first: what the experts from `first` on add to a token.
//   inputs   x [tokens, hidden] f32; experts [tokens, top_k] i32; weights [tokens, top_k] f32.
//   outputs  y [tokens, hidden] f32; inference may write it over x.
//   backward inputs: x, experts, weights, dy.  outputs: dx[t, :] = share[t] * dy[t, :]; dweights[t, j] = x[t, :] .
//            dy[t, :] where experts[t, j] >= first, else 0.
//
// load_balancing_loss: loss = experts * sum over e of fraction[e] * mean[e], over all rows of all layers together,
// where
//   fraction[e] is the share of rows that have expert e among the `top_k` of the largest logits (of equals the lower
//   number comes first), and mean[e] the mean of its softmax. 0 without a row.
//   inputs   logits0, logits1, … [tokens, experts] f32, one for each layer.
//   outputs  loss [1] f32; forward also saves fraction [experts] f32.
//   backward inputs: logits0, …, fraction, dloss.  outputs: dlogits0, …. The choice counts as constant.
//   Sums are in f64, over blocks of rows that do not depend on the thread count.
//   Source: Fedus et al. 2021, equations 4 to 6, as transformers' load_balancing_loss_func has them.
#pragma once

#include <cstdint>

#include "eadem/core/dtype.h"
#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

struct RouteAttrs {
  enum class Scoring : uint8_t { softmax, sigmoid, sqrt_softplus };
  int64_t top_k = 1;
  Scoring scoring = Scoring::softmax;
  bool renormalize = false;
  float epsilon = 0.0f;  // with renormalize
  float scale = 1.0f;
  float least_sum = 0.0f;  // with renormalize
  int64_t groups = 1;      // they divide the experts
  int64_t top_groups = 1;
  int64_t group_best = 1;  // 1 or 2
  bool by_token = false;   // without a bias and groups

  // Experts are chosen by their scores, not by their logits.
  bool by_score(bool has_bias) const { return has_bias || groups > 1; }
};

struct LoadBalancingLossAttrs {
  int64_t top_k = 1;
};

struct ExpertOrderAttrs {
  int64_t experts = 1;     // those that have weights
  int64_t identities = 0;  // numbered behind them
};

struct IdentityExpertsAttrs {
  int64_t first = 0;
};

struct PermuteAttrs {
  bool weighted = false;
};

struct UnpermuteAttrs {
  bool weighted = true;
};

struct ClampedSwigluAttrs {
  float limit = 7.0f;
  float alpha = 1.702f;
  float offset = 1.0f;  // added to up
};

struct GroupedLinearAttrs {
  DType out_dtype = DType::f32;
  MatmulInput matmul_input = MatmulInput::int8;  // how far x may be rounded
};

}  // namespace eadem::kernels
