// SPDX-License-Identifier: Apache-2.0
//
// The ops of mixtures of experts: ties, the order of pairs, bits that depend on nothing but a row and its expert,
// types.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/op_cases.h"
#include "tests/ops/pass_calls.h"
#include "tests/support/refusal.h"
#include "tests/workloads/inputs.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {
namespace {

using kernels::Kernel;
using kernels::Pass;

constexpr DType kF32 = DType::f32, kI32 = DType::i32;

Tensor ints(const Shape& shape, const std::vector<int32_t>& values) {
  Tensor result = Tensor::on_host(kI32, shape);
  std::copy(values.begin(), values.end(), result.view.as<int32_t>());
  return result;
}

Tensor floats(const Shape& shape, const std::vector<float>& values) {
  Tensor result = Tensor::on_host(kF32, shape);
  std::copy(values.begin(), values.end(), result.view.as<float>());
  return result;
}

std::vector<int32_t> values_of(const Tensor& tensor) {
  const auto* begin = tensor.view.as<int32_t>();
  return {begin, begin + tensor.view.num_elements()};
}

// Runs the first kernel that takes the call.
std::vector<Tensor> run(Device& device, const PassCall& call) {
  for (const Kernel* kernel : call.op->kernels(kernels::backend_of(device)))
    if (kernel->pass == call.pass && kernel->can_handle(call.request(device)).accepted)
      return run_kernel(device, *kernel, call, {}, std::string(call.op->name()));
  return {};
}

std::vector<Tensor> run(Device& device, const ops::OpPtr& op, const std::vector<TensorType>& types, int64_t tokens,
                        const std::vector<Tensor>& inputs) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  return run(device, straight_call(ops::Workload{"", op, types, symbols}, Pass::inference, inputs));
}

// The reference is held to it by the same call: expected_call runs it.
TEST(Route, TiesGoToTheLowerExpert) {
  const auto op = std::make_shared<ops::Route>(kernels::RouteAttrs{.top_k = 3, .renormalize = true});
  const std::vector<TensorType> types = {TensorType(kF32, {Symbol::tokens, 5}), kernels::unconnected_port()};
  const std::vector<Tensor> inputs = {floats(Shape{3, 5}, {1, 1, 1, 1, 1, 0, 2, 0, 2, 2, -1, 3, 3, -1, 0}), Tensor{}};
  const std::vector<int32_t> expected = {0, 1, 2, 1, 3, 4, 1, 2, 4};
  SymbolValues symbols;
  symbols[Symbol::tokens] = 3;
  const ExpectedCall want = *expected_call(ops::Workload{"", op, types, symbols}, Pass::inference, inputs, 1);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(want.expected[0].data[i], expected[i]);
  for (const DeviceGroup& group : device_groups()) {
    const std::vector<Tensor> out = run(*group.devices[0], op, types, 3, inputs);
    ASSERT_EQ(out.size(), 2u);
    EXPECT_EQ(values_of(out[0]), expected) << group.name;
    for (size_t j = 0; j < 3; ++j) EXPECT_FLOAT_EQ(out[1].view.as<float>()[j], 1.0f / 3) << group.name;
  }
}

// A correction chooses and does not weigh.
TEST(Route, ABiasChangesTheChoiceOnly) {
  using Scoring = kernels::RouteAttrs::Scoring;
  const auto op = std::make_shared<ops::Route>(kernels::RouteAttrs{.top_k = 1, .scoring = Scoring::sigmoid});
  const std::vector<TensorType> types = {TensorType(kF32, {Symbol::tokens, 3}), TensorType(kF32, {3})};
  for (const DeviceGroup& group : device_groups()) {
    const std::vector<Tensor> out =
        run(*group.devices[0], op, types, 1, {floats(Shape{1, 3}, {2, 1, 0}), floats(Shape{3}, {0, 0, 0.5f})});
    EXPECT_EQ(values_of(out[0]), std::vector<int32_t>{2}) << group.name;
    EXPECT_EQ(out[1].view.as<float>()[0], 0.5f) << group.name;
  }
}

// Groups have two experts. The best groups are those with the best expert (DeepSeek V2), or with the best sum of two
// experts (V3). Experts of other groups are not chosen, however good.
TEST(Route, OnlyTheBestGroupsAreChosenFrom) {
  kernels::RouteAttrs attrs{.top_k = 2, .scoring = kernels::RouteAttrs::Scoring::sigmoid};
  attrs.groups = 3;
  const std::vector<TensorType> types = {TensorType(kF32, {Symbol::tokens, 6}), kernels::unconnected_port()};
  const std::vector<Tensor> inputs = {floats(Shape{2, 6}, {3, -9, 2, 1, 0, 0, 1, 1, 1, 1, 1, 1}), Tensor{}};
  struct Row {
    int64_t top_groups, group_best;
    std::vector<int32_t> expected;
  };
  for (const Row& row :
       {Row{1, 1, {0, 1, 0, 1}}, Row{1, 2, {2, 3, 0, 1}}, Row{2, 2, {2, 3, 0, 1}}, Row{3, 1, {0, 2, 0, 1}}}) {
    attrs.top_groups = row.top_groups, attrs.group_best = row.group_best;
    for (const DeviceGroup& group : device_groups()) {
      const std::vector<Tensor> out = run(*group.devices[0], std::make_shared<ops::Route>(attrs), types, 2, inputs);
      EXPECT_EQ(values_of(out[0]), row.expected) << group.name << " " << row.top_groups << " " << row.group_best;
    }
  }
}

// What follows reads memory by these numbers.
TEST(Route, LogitsThatAreNoNumbersStillChooseExperts) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const auto op = std::make_shared<ops::Route>(kernels::RouteAttrs{.top_k = 3});
  const std::vector<TensorType> types = {TensorType(kF32, {Symbol::tokens, 4}), kernels::unconnected_port()};
  for (const DeviceGroup& group : device_groups()) {
    const std::vector<Tensor> out =
        run(*group.devices[0], op, types, 4,
            {floats(Shape{4, 4}, {nan, nan, nan, nan, 1, nan, 2, nan, -inf, -inf, -inf, -inf, inf, nan, inf, 0}),
             Tensor{}});
    const std::vector<int32_t> chosen = values_of(out[0]);
    for (size_t t = 0; t < 4; ++t) {
      const std::set<int32_t> own(chosen.begin() + static_cast<std::ptrdiff_t>(3 * t),
                                  chosen.begin() + static_cast<std::ptrdiff_t>(3 * t + 3));
      EXPECT_EQ(own.size(), 3u) << group.name << " row " << t;
      EXPECT_TRUE(*own.begin() >= 0 && *own.rbegin() < 4) << group.name << " row " << t;
    }
  }
}

TEST(ExpertOrder, PairsOfAnExpertStayInTheOrderOfTokens) {
  const auto op = std::make_shared<ops::ExpertOrder>(kernels::ExpertOrderAttrs{4});
  for (const DeviceGroup& group : device_groups()) {
    const std::vector<Tensor> out =
        run(*group.devices[0], op, {TensorType(kI32, {Symbol::tokens, 2})}, 3, {ints(Shape{3, 2}, {3, 0, 0, 1, 3, 1})});
    EXPECT_EQ(values_of(out[0]), (std::vector<int32_t>{4, 0, 1, 2, 5, 3})) << group.name;
    EXPECT_EQ(values_of(out[1]), (std::vector<int32_t>{0, 2, 4, 4, 6})) << group.name;
  }
}

TEST(ExpertOrder, PairsOfIdentitiesStandBehindAllOthers) {
  const auto op = std::make_shared<ops::ExpertOrder>(kernels::ExpertOrderAttrs{.experts = 3, .identities = 2});
  for (const DeviceGroup& group : device_groups()) {
    const std::vector<Tensor> out =
        run(*group.devices[0], op, {TensorType(kI32, {Symbol::tokens, 3})}, 2, {ints(Shape{2, 3}, {4, 0, 2, 3, 4, 0})});
    EXPECT_EQ(values_of(out[0]), (std::vector<int32_t>{3, 0, 2, 4, 5, 1})) << group.name;
    EXPECT_EQ(values_of(out[1]), (std::vector<int32_t>{0, 2, 2, 3})) << group.name;
  }
}

// Whatever the memory of the outputs held, and the rows of no expert hold.
TEST(GroupedLinear, RowsOfNoExpertAreZero) {
  constexpr int64_t kRows = 9, kOutputs = 20;
  const Encoding* quantized = stack_encoding(workloads::quantized_types().front().encoding);
  for (const Encoding* encoding : {static_cast<const Encoding*>(nullptr), quantized}) {
    const int64_t width = encoding == nullptr ? 33 : 2 * workloads::quantized_types().front().unit;
    const ops::Workload row{
        "rows of no expert",
        std::make_shared<ops::GroupedLinear>(kernels::GroupedLinearAttrs{}),
        {TensorType(kF32, {Symbol::tokens, width}), TensorType(kF32, {3, kOutputs, width}, encoding),
         TensorType(kI32, {4}), kernels::unconnected_port()},
        [] {
          SymbolValues symbols;
          symbols[Symbol::tokens] = kRows;
          return symbols;
        }()};
    for (const int32_t end : {0, 5, 9})
      for (const Pass pass : {Pass::inference, Pass::backward}) {
        if (pass == Pass::backward && encoding != nullptr) continue;
        std::vector<Tensor> inputs = workloads::make_inputs(*row.op, row.inputs, row.symbols, 4);
        inputs[2] = ints(Shape{4}, {0, end / 2, end / 2, end});
        const PassCall call = pass == Pass::backward ? expected_call(row, pass, std::move(inputs), 4)->call
                                                     : straight_call(row, pass, std::move(inputs));
        for (const DeviceGroup& group : device_groups()) {
          const std::vector<Tensor> out = run(*group.devices[0], call);
          if (out.empty()) continue;
          const int64_t columns = pass == Pass::backward ? width : kOutputs;
          for (int64_t i = 0; i < kRows * columns; ++i) {
            const float value = out[0].view.as<float>()[i];
            const bool of_an_expert = i < end * columns;
            ASSERT_EQ(value != 0.0f, of_an_expert) << group.name << " row " << i / columns << " of " << end;
          }
        }
      }
  }
}

// Each row has the bits that linear gives it with the matrix of its expert, alone: no other row shows in it.
TEST(GroupedLinear, ARowHasTheBitsOfLinearWithItsExpert) {
  for (const ops::Workload& row : op_cases("grouped_linear")) {
    if (row.symbols[Symbol::tokens] == 0) continue;
    const PassCall call = straight_call(row, Pass::inference, 4);
    const TensorView &x = call.inputs[0].view, &weight = call.inputs[1].view;
    const auto* offsets = call.inputs[2].view.as<int32_t>();
    const MatrixStack experts(weight);
    const MatmulInput input = row.op->attrs().get<kernels::GroupedLinearAttrs>().matmul_input;
    for (const DeviceGroup& group : device_groups()) {
      Device& device = *group.devices[0];
      const std::vector<Tensor> y = run(device, call);
      if (y.empty()) continue;
      for (int64_t e = 0; e < weight.shape[0]; ++e)
        for (int64_t r : {offsets[e], offsets[e + 1] - 1}) {
          if (offsets[e] == offsets[e + 1]) continue;
          const TensorView matrix = experts.matrix(weight, e);
          const bool has_bias = row.inputs[3].rank() > 0;
          Tensor bias = call.inputs[3];
          if (has_bias) bias.view = TensorView(bias.view.rows(e, 1).data, bias.dtype(), Shape{matrix.shape[0]});
          const std::vector<TensorType> types = {
              TensorType(kF32, {Symbol::tokens, x.shape[1]}),
              TensorType(weight.dtype, {matrix.shape[0], matrix.shape[1]}, matrix.encoding),
              has_bias ? TensorType(bias.dtype(), {matrix.shape[0]}) : kernels::unconnected_port()};
          const kernels::LinearAttrs attrs{.has_bias = has_bias, .matmul_input = input};
          const std::vector<Tensor> alone =
              run(device, std::make_shared<ops::Linear>(attrs), types, 1,
                  {Tensor(x.rows(r, 1), call.inputs[0].storage), Tensor(matrix, call.inputs[1].storage), bias});
          ASSERT_FALSE(alone.empty()) << row.name;
          EXPECT_TRUE(same_bits(y[0].view.rows(r, 1), alone[0].view)) << row.name << " row " << r << " " << group.name;
        }
      if (HasFailure()) return;
    }
  }
}

// The sum of a token's rows is in the order of its experts, wherever the rows stand.
TEST(Unpermute, BitsDoNotDependOnWhereTheRowsAre) {
  constexpr int64_t kHidden = 37, kTopK = 5;
  const Tensor x = workloads::random_tensor(kF32, Shape{kTopK, kHidden}, 3),
               weights = workloads::random_tensor(kF32, Shape{1, kTopK}, 4);
  const std::vector<TensorType> types = {TensorType(kF32, {kTopK * Dim(Symbol::tokens), kHidden}),
                                         TensorType(kI32, {Symbol::tokens, kTopK}),
                                         TensorType(kF32, {Symbol::tokens, kTopK})};
  for (const DeviceGroup& group : device_groups()) {
    std::vector<int32_t> rows = {0, 1, 2, 3, 4};
    const auto op = std::make_shared<ops::Unpermute>();
    const Tensor first = run(*group.devices[0], op, types, 1, {x, ints(Shape{1, kTopK}, rows), weights})[0];
    while (std::next_permutation(rows.begin(), rows.end())) {
      Tensor moved = Tensor::on_host(kF32, Shape{kTopK, kHidden});
      for (int64_t j = 0; j < kTopK; ++j)
        std::memcpy(moved.view.rows(rows[static_cast<size_t>(j)], 1).data, x.view.rows(j, 1).data,
                    kHidden * sizeof(float));
      const Tensor y = run(*group.devices[0], op, types, 1, {moved, ints(Shape{1, kTopK}, rows), weights})[0];
      ASSERT_TRUE(same_bits(first.view, y.view)) << group.name;
    }
  }
}

TEST(ExpertTypes, WhatFitsAndWhatDoesNot) {
  const Symbol tokens = Symbol::tokens;
  const auto infer = [](const ops::Op& op, const std::vector<TensorType>& in) { return op.infer_types(in); };
  const TensorType none = kernels::unconnected_port(), pairs(kI32, {tokens, 2}), x(kF32, {tokens, 8});
  const auto routed = infer(ops::Route({.top_k = 2}), {TensorType(kF32, {tokens, 4}), none});
  EXPECT_EQ(routed[0], pairs);
  EXPECT_EQ(routed[1], TensorType(kF32, {tokens, 2}));
  EXPECT_HAS(refusal([&] {
               infer(ops::Route({.top_k = 5}), {TensorType(kF32, {tokens, 4}), none});
             }),
             "5 experts are chosen");
  EXPECT_HAS(refusal([&] { ops::Route({.top_k = 0}); }), "top_k is 0");
  EXPECT_HAS(refusal([&] { ops::Route({.top_k = 1, .groups = 2, .top_groups = 3}); }), "top_groups is 3 of 2 groups");
  EXPECT_HAS(refusal([&] {
               infer(ops::Route({.top_k = 3, .groups = 2}), {TensorType(kF32, {tokens, 4}), none});
             }),
             "3 experts are chosen of 1 groups of 2");
  EXPECT_HAS(refusal([] { ops::ClampedSwiglu({.limit = 0}); }), "limit is 0");
  EXPECT_EQ(infer(ops::LoadBalancingLoss(2, {.top_k = 2}), {x, x})[0], TensorType(kF32, {1}));
  EXPECT_HAS(refusal([&] { ops::LoadBalancingLoss(0, {.top_k = 2}); }), "0 layers");
  EXPECT_HAS(refusal([&] { infer(ops::LoadBalancingLoss(1, {.top_k = 9}), {x}); }), "9 experts are chosen");
  EXPECT_HAS(refusal([&] {
               infer(ops::LoadBalancingLoss(2, {.top_k = 2}), {x, TensorType(kF32, {tokens, 4})});
             }),
             "'logits1'");
  EXPECT_EQ(infer(ops::ExpertOrder({4}), {pairs})[1], TensorType(kI32, {5}));
  EXPECT_EQ(infer(ops::ExpertOrder({4, 3}), {pairs})[1], TensorType(kI32, {5}));
  EXPECT_HAS(refusal([] { ops::ExpertOrder({4, -1}); }), "identities is -1");
  EXPECT_EQ(infer(ops::IdentityExperts({4}), {x, pairs, routed[1]})[0], x);
  EXPECT_HAS(refusal([&] {
               infer(ops::IdentityExperts({4}), {x, pairs, TensorType(kF32, {tokens, 3})});
             }),
             "'weights'");
  EXPECT_HAS(refusal([] { ops::IdentityExperts({-1}); }), "first is -1");
  const TensorType many(kF32, {2 * Dim(tokens), 8});
  EXPECT_EQ(infer(ops::Permute(), {x, pairs})[0], many);
  EXPECT_EQ(infer(ops::Unpermute(), {many, pairs, routed[1]})[0], x);
  EXPECT_HAS(refusal([&] { infer(ops::Unpermute(), {x, pairs, routed[1]}); }), "expected 2*tokens in dimension 0");
  EXPECT_EQ(infer(ops::Permute({.weighted = true}), {x, pairs, routed[1]})[0], many);
  EXPECT_EQ(infer(ops::Unpermute({.weighted = false}), {many, pairs})[0], x);
  EXPECT_HAS(refusal([&] { infer(ops::Permute({.weighted = true}), {x, pairs, pairs}); }), "'weights' is i32");
  const ops::GroupedLinear grouped({DType::bf16});
  const TensorType weight(kF32, {4, 6, 8}), offsets(kI32, {5});
  EXPECT_EQ(infer(grouped, {many, weight, offsets, none})[0], TensorType(DType::bf16, {2 * Dim(tokens), 6}));
  EXPECT_HAS(refusal([&] {
               infer(grouped, {many, TensorType(kF32, {4, 6, 9}), offsets, none});
             }),
             "last dimension of 'x'");
  EXPECT_HAS(refusal([&] { infer(grouped, {many, weight, TensorType(kI32, {4}), none}); }), "'offsets' is i32 [4]");

  const auto divided = [](TensorType type, Sharding sharding) {
    type.sharding = sharding;
    return type;
  };
  const auto rule = [&](Sharding of_x, Sharding of_weight) {
    return grouped.infer_sharding(std::vector{divided(many, of_x), divided(weight, of_weight), offsets, none})[0];
  };
  const Sharding whole = Sharding::replicated();
  EXPECT_EQ(rule(whole, whole), whole);
  EXPECT_EQ(rule(whole, Sharding::along(1)), Sharding::along(1));
  EXPECT_EQ(rule(Sharding::along(1), Sharding::along(2)), Sharding::partial());
  EXPECT_HAS(refusal([&] { rule(whole, Sharding::along(0)); }), "'weight' is sharded(0) and 'x' replicated");
  EXPECT_HAS(refusal([&] { rule(Sharding::along(0), Sharding::along(0)); }), "'offsets' replicated");
  const Sharding own = Sharding::along(0);
  EXPECT_EQ(
      grouped.infer_sharding(std::vector{divided(many, own), divided(weight, own), divided(offsets, own), none})[0],
      own);
  EXPECT_EQ(
      grouped.wanted_sharding(std::vector{divided(many, own), divided(weight, own), divided(offsets, own), none}, 0),
      own);
}

// A step of few tokens reads few experts.
TEST(ExpertCost, CountsTheExpertsThatRowsCanChoose) {
  const ops::GroupedLinear op({kF32});
  const std::vector<TensorType> types = {TensorType(kF32, {2 * Dim(Symbol::tokens), 8}), TensorType(kF32, {16, 6, 8}),
                                         TensorType(kI32, {17}), kernels::unconnected_port()};
  const auto weights_read = [&](int64_t tokens) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    const double rows = 2.0 * static_cast<double>(tokens);
    const ops::Cost cost = op.cost(Pass::inference, types, op.infer_types(types), symbols);
    EXPECT_EQ(cost.flops, 2 * rows * 6 * 8);
    return cost.bytes - 4 * (rows * 8 + rows * 6 + 17);
  };
  const auto backward_bytes = [&](int64_t tokens) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    return op.cost(Pass::backward, types, op.infer_types(types), symbols).bytes;
  };
  // Weights are read, and their gradients read and written; of a row x is read, dy, and dx is written.
  EXPECT_EQ(backward_bytes(1), 3 * 2 * 4.0 * 6 * 8 + 4 * (2.0 * (8 + 6 + 8) + 17));
  EXPECT_EQ(backward_bytes(8), 3 * 16 * 4.0 * 6 * 8 + 4 * (16.0 * (8 + 6 + 8) + 17));
  EXPECT_EQ(weights_read(1), 2 * 4.0 * 6 * 8);
  EXPECT_EQ(weights_read(8), 16 * 4.0 * 6 * 8);
  EXPECT_EQ(weights_read(100), 16 * 4.0 * 6 * 8);
}

}  // namespace
}  // namespace eadem::test
