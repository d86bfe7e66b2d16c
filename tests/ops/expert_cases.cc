// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/expert_cases.h"

#include <optional>

#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/op_cases.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {

namespace {

using ops::Workload;

constexpr DType kF32 = DType::f32, kBf16 = DType::bf16, kF16 = DType::f16;

SymbolValues with_tokens(int64_t tokens) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  return symbols;
}

Dim times(int64_t top_k) { return top_k * Dim(Symbol::tokens); }

std::vector<Workload> route() {
  using Scoring = kernels::RouteAttrs::Scoring;
  std::vector<Workload> cases;
  const auto add = [&](const kernels::RouteAttrs& attrs, bool bias, int64_t experts, int64_t tokens) {
    cases.push_back(named_case(
        std::make_shared<ops::Route>(attrs),
        {TensorType(kF32, {Symbol::tokens, experts}), bias ? TensorType(kF32, {experts}) : kernels::unconnected_port()},
        with_tokens(tokens)));
  };
  for (Scoring scoring : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrt_softplus})
    for (bool renormalize : {false, true})
      for (bool bias : {false, true}) {
        const float epsilon = scoring == Scoring::softmax ? 0.0f : 1e-20f;
        for (int64_t experts : {1, 3, 8, 17, 64, 129}) add({1, scoring, renormalize, epsilon, 1.0f}, bias, experts, 3);
        for (int64_t top_k : {2, 7, 8}) add({top_k, scoring, renormalize, epsilon, 2.5f}, bias, 8, 5);
        for (int64_t tokens : {0, 1, 70}) add({4, scoring, renormalize, epsilon, 1.0f}, bias, 60, tokens);
        // Groups: of one expert, of all, and those of DeepSeek V2 (by their best) and V3 (by their two best).
        const auto add_groups = [&](int64_t top_k, int64_t groups, int64_t top_groups, int64_t group_best,
                                    int64_t experts) {
          kernels::RouteAttrs attrs{top_k, scoring, renormalize, epsilon, 1.0f};
          attrs.groups = groups, attrs.top_groups = top_groups, attrs.group_best = group_best;
          add(attrs, bias, experts, 5);
        };
        add_groups(3, 7, 3, 1, 7);
        add_groups(6, 8, 3, 1, 160);
        add_groups(8, 8, 4, 2, 256);
        add_groups(4, 3, 2, 2, 6);
        // Sums below the least one, and above.
        kernels::RouteAttrs floored{2, scoring, renormalize, 0.0f, 1.0f, 0.6f};
        add(floored, bias, 4, 20);
      }
  for (Scoring scoring : {Scoring::sigmoid, Scoring::sqrt_softplus})
    for (int64_t top_k : {1, 3})
      for (int64_t tokens : {0, 1, 70}) {
        kernels::RouteAttrs attrs{top_k, scoring, true, 1e-20f, 1.5f};
        attrs.by_token = true;
        cases.push_back(named_case(std::make_shared<ops::Route>(attrs),
                                   {TensorType(kF32, {Symbol::tokens, 9}), kernels::unconnected_port(),
                                    TensorType(kF32, {7, top_k}), TensorType(DType::i32, {Symbol::tokens})},
                                   with_tokens(tokens)));
      }
  return cases;
}

std::vector<Workload> expert_order() {
  std::vector<Workload> cases;
  for (int64_t experts : {1, 4, 33})
    for (int64_t top_k : {1, 3, 8})
      for (int64_t tokens : {0, 1, 5, 100})
        for (int64_t identities : {0, 2, 9})
          if (top_k <= experts + identities)
            cases.push_back(
                named_case(std::make_shared<ops::ExpertOrder>(kernels::ExpertOrderAttrs{experts, identities}),
                           {TensorType(DType::i32, {Symbol::tokens, top_k})}, with_tokens(tokens)));
  return cases;
}

std::vector<Workload> moved_rows(bool back, bool weighted) {
  std::vector<Workload> cases;
  for (DType dtype : {kF32, kBf16})
    for (int64_t top_k : {1, 2, 5})
      for (int64_t hidden : {1, 7, 16, 33, 130})
        for (int64_t tokens : {0, 1, 9}) {
          const TensorType x(dtype, {back ? times(top_k) : Symbol::tokens, hidden});
          std::vector<TensorType> types = {x, TensorType(DType::i32, {Symbol::tokens, top_k})};
          if (weighted) types.emplace_back(kF32, std::initializer_list<Dim>{Symbol::tokens, top_k});
          const ops::OpPtr op = back ? ops::OpPtr(std::make_shared<ops::Unpermute>(kernels::UnpermuteAttrs{weighted}))
                                     : ops::OpPtr(std::make_shared<ops::Permute>(kernels::PermuteAttrs{weighted}));
          cases.push_back(named_case(op, std::move(types), with_tokens(tokens)));
        }
  return cases;
}

// On one rank, which has all experts; tests/distributed/expert_exchange_test.cc has several.
std::vector<Workload> exchanged_rows(bool back) {
  std::vector<Workload> cases;
  for (bool same_tokens : {false, true})
    for (DType dtype : {kF32, kBf16})
      for (int64_t top_k : {1, 3})
        for (int64_t hidden : {1, 7, 33})
          for (int64_t tokens : {0, 1, 9}) {
            const kernels::ExpertExchangeAttrs attrs{.experts = 5, .top_k = top_k, .same_tokens = same_tokens};
            const Dim places = top_k * Dim(same_tokens ? Symbol::tokens : kernels::rank_tokens());
            std::vector<TensorType> types = {TensorType(dtype, {back ? places : times(top_k), hidden}),
                                             TensorType(DType::i32, {6})};
            if (back) types.emplace_back(DType::i32, std::initializer_list<Dim>{1, 5});
            const ops::OpPtr op = back ? ops::OpPtr(std::make_shared<ops::ExpertCombine>(attrs))
                                       : ops::OpPtr(std::make_shared<ops::ExpertDispatch>(attrs));
            SymbolValues symbols = with_tokens(tokens);
            symbols[kernels::rank_tokens()] = tokens;
            cases.push_back(named_case(op, std::move(types), symbols));
          }
  return cases;
}

std::vector<Workload> clamped_swiglu() {
  std::vector<Workload> cases;
  for (const kernels::ClampedSwigluAttrs& attrs : {kernels::ClampedSwigluAttrs{}, {3.0f, 1.0f, 0.0f}})
    for (DType dtype : {kF32, kBf16})
      for (int64_t width : {1, 7, 16, 33, 130})
        for (int64_t tokens : {0, 1, 9}) {
          const TensorType type(dtype, {Symbol::tokens, width});
          cases.push_back(named_case(std::make_shared<ops::ClampedSwiglu>(attrs), {type, type}, with_tokens(tokens)));
        }
  return cases;
}

std::vector<Workload> gate_rows() {
  std::vector<Workload> cases;
  for (DType dtype : {kF32, kBf16})
    for (int64_t hidden : {1, 7, 16, 33, 130})
      for (int64_t tokens : {0, 1, 9})
        cases.push_back(
            named_case(std::make_shared<ops::GateRows>(),
                       {TensorType(dtype, {Symbol::tokens, hidden}), TensorType(dtype, {Symbol::tokens, 1})},
                       with_tokens(tokens)));
  for (int64_t width : {1, 7, 16, 33})
    for (int64_t gates : {2, 5})
      cases.push_back(
          named_case(std::make_shared<ops::GateRows>(),
                     {TensorType(kF32, {Symbol::tokens, gates * width}), TensorType(kF32, {Symbol::tokens, gates})},
                     with_tokens(9)));
  return cases;
}

// Of all choices, of some, of none.
std::vector<Workload> identity_experts() {
  std::vector<Workload> cases;
  for (DType dtype : {kF32, kBf16})
    for (int64_t first : {0, 5, 1000})
      for (int64_t top_k : {1, 4})
        for (int64_t hidden : {1, 7, 16, 33, 130})
          for (int64_t tokens : {0, 1, 9})
            cases.push_back(
                named_case(std::make_shared<ops::IdentityExperts>(kernels::IdentityExpertsAttrs{first}),
                           {TensorType(dtype, {Symbol::tokens, hidden}),
                            TensorType(DType::i32, {Symbol::tokens, top_k}), TensorType(kF32, {Symbol::tokens, top_k})},
                           with_tokens(tokens)));
  return cases;
}

// Around the width of a vector, and the rows of one block.
std::vector<Workload> load_balancing_loss() {
  std::vector<Workload> cases;
  const auto add = [&](int layers, int64_t top_k, int64_t experts, int64_t tokens) {
    cases.push_back(
        named_case(std::make_shared<ops::LoadBalancingLoss>(layers, kernels::LoadBalancingLossAttrs{.top_k = top_k}),
                   std::vector<TensorType>(static_cast<size_t>(layers), TensorType(kF32, {Symbol::tokens, experts})),
                   with_tokens(tokens)));
  };
  for (int layers : {1, 3})
    for (int64_t experts : {1, 3, 8, 17, 129}) add(layers, 1, experts, 5);
  for (int64_t top_k : {2, 7, 8}) add(2, top_k, 8, 5);
  for (int64_t tokens : {0, 1, 255, 256, 257, 600}) add(2, 4, 60, tokens);
  return cases;
}

std::vector<Workload> grouped_linear() {
  std::vector<Workload> cases;
  const auto add = [&](DType x, const TensorType& weight, DType out, int64_t top_k, int64_t tokens,
                       MatmulInput input = MatmulInput::int8, std::optional<DType> bias = std::nullopt) {
    cases.push_back(
        named_case(std::make_shared<ops::GroupedLinear>(kernels::GroupedLinearAttrs{out, input}),
                   {TensorType(x, {times(top_k), weight.dim(2)}), weight, TensorType(DType::i32, {weight.dim(0) + 1}),
                    bias ? TensorType(*bias, {weight.dim(0), weight.dim(1)}) : kernels::unconnected_port()},
                   with_tokens(tokens)));
  };
  for (DType x : {kF32, kBf16})
    for (DType weight : {kF32, kBf16, kF16})
      for (DType out : {kF32, kBf16})
        for (int64_t tokens : {0, 1, 6}) add(x, TensorType(weight, {5, 18, 33}), out, 2, tokens);
  // More experts than rows; one expert; many rows an expert; panels of 16; blocks of 256 terms.
  add(kF32, TensorType(kF32, {40, 7, 9}), kF32, 1, 3);
  add(kF32, TensorType(kF32, {1, 17, 16}), kF32, 3, 4);
  for (int64_t tokens : {13, 100}) add(kF32, TensorType(kF32, {3, 35, 17}), kF32, 2, tokens);
  for (int64_t outputs : {1, 15, 16, 65}) add(kF32, TensorType(kBf16, {2, outputs, 31}), kF32, 1, 5);
  for (int64_t width : {1, 257, 513}) add(kF32, TensorType(kF32, {2, 20, width}), kF32, 1, 5);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (int64_t tokens : {0, 1, 9})
      for (MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
        add(kF32, TensorType(kF32, {3, 20, 2 * unit}, stack_encoding(encoding)), kF32, 2, tokens, input);
  add(kF32, TensorType(kBf16, {3, 20, 70}), kF32, 2, 9, MatmulInput::f32);
  for (DType bias : {kF32, kBf16, kF16})
    for (int64_t tokens : {1, 9}) add(kF32, TensorType(kF32, {5, 70, 33}), kF32, 2, tokens, MatmulInput::int8, bias);
  // More rows of an expert than products take at once.
  add(kF32, TensorType(kF32, {2, 20, 17}), kF32, 1, 500);
  add(kF32, TensorType(kF32, {2, 80, 64}, stack_encoding(workloads::quantized_types().front().encoding)), kF32, 1, 500);
  return cases;
}

}  // namespace

std::vector<Workload> expert_cases(std::string_view op) {
  if (op == "route") return route();
  if (op == "expert_order") return expert_order();
  if (op == "permute" || op == "unpermute") {
    std::vector<Workload> cases = moved_rows(op == "unpermute", false);
    for (Workload& row : moved_rows(op == "unpermute", true)) cases.push_back(std::move(row));
    return cases;
  }
  if (op == "expert_dispatch" || op == "expert_combine") return exchanged_rows(op == "expert_combine");
  if (op == "clamped_swiglu") return clamped_swiglu();
  if (op == "gate_rows") return gate_rows();
  if (op == "identity_experts") return identity_experts();
  if (op == "load_balancing_loss") return load_balancing_loss();
  if (op == "grouped_linear") return grouped_linear();
  return {};
}

}  // namespace eadem::test
