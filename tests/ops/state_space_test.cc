// SPDX-License-Identifier: Apache-2.0
//
// state_space_scan: values of a recurrence that a line can hold, and types that do not fit. Bits are compared in
// recurrent_test.cc.
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/ops/all_ops.h"
#include "tests/support/refusal.h"
#include "tests/support/values.h"

namespace eadem::test {
namespace {

using kernels::Pass;

constexpr int64_t kHeads = 4, kHeadDim = 11, kGroups = 2, kState = 35, kSlots = 4;

std::vector<TensorType> types(bool cached) {
  const TensorType shared(DType::f32, {Symbol::tokens, kGroups, kState}), each(DType::f32, {kHeads});
  std::vector<TensorType> result = {TensorType(DType::f32, {Symbol::tokens, kHeads, kHeadDim}),
                                    TensorType(DType::f32, {Symbol::tokens, kHeads}),
                                    shared,
                                    shared,
                                    each,
                                    each,
                                    each,
                                    TensorType(DType::i32, {Dim(Symbol::sequences, 1)})};
  if (cached) {
    result.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences});
    result.emplace_back(DType::f32, std::initializer_list<Dim>{kSlots, kHeads, kState, kHeadDim});
  }
  return result;
}

// One head of one number: S = e^(-2 delta) S + delta b x, with softplus(0) = ln 2.
TEST(StateSpaceScan, Reference) {
  const ops::StateSpaceScan op(kernels::StateSpaceScanAttrs{.dt_max = 0.5f});
  const double delta = 0.5, ln2 = std::log(2.0);
  std::vector<RefTensor> in = {
      {{3, 1, 1}, {1, 2, 3}}, {{3, 1}, {0, -40, 7}}, {{3, 1, 1}, {4, 5, 6}}, {{3, 1, 1}, {1, 10, 100}}, {{1}, {0}},
      {{1}, {ln2}},           {{1}, {0.25}},         {{3}, {0, 2, 3}}};
  std::vector<RefTensor> out = {zeros(Shape{3, 1, 1})};
  op.reference(Pass::inference, in, out);
  // The second token's step is nearly none: it forgets and learns nothing. The third begins a sequence.
  const double s0 = delta * 4;
  EXPECT_NEAR(out[0].data[0], s0 + 0.25, 1e-12);
  EXPECT_NEAR(out[0].data[1], 10 * s0 + 0.5, 1e-12);
  EXPECT_NEAR(out[0].data[2], 100 * delta * 6 * 3 + 0.75, 1e-12);
  in[1].data[1] = 0.1;  // softplus(0.1) is above dt_max, too
  op.reference(Pass::inference, in, out);
  EXPECT_NEAR(out[0].data[1], 10 * (std::exp(-2 * delta) * s0 + delta * 5 * 2) + 0.5, 1e-12);
}

TEST(StateSpaceScan, RefusesWhatDoesNotFit) {
  EXPECT_EQ(refusal([] { ops::StateSpaceScan({.dt_min = 1.0f, .dt_max = 0.5f}); }),
            "InvalidArgument: state_space_scan: dt_min is 1 and dt_max is 0.5; expected 0 <= dt_min <= dt_max");
  std::vector<TensorType> bad = types(true);
  bad[3] = TensorType(DType::f32, {Symbol::tokens, kGroups, kState + 1});
  const ops::StateSpaceScan op({.cached = true});
  EXPECT_NE(refusal([&] { op.infer_types(bad); }).find("'c'"), std::string::npos);
  bad = types(true);
  bad[2] = bad[3] = TensorType(DType::f32, {Symbol::tokens, 3, kState});
  EXPECT_NE(refusal([&] { op.infer_types(bad); }).find("4 heads and 'b' 3 groups"), std::string::npos);
  bad = types(true);
  bad[9] = TensorType(DType::bf16, {kSlots, kHeads, kState, kHeadDim});
  EXPECT_NE(refusal([&] { op.infer_types(bad); }).find("'state'"), std::string::npos);
}

}  // namespace
}  // namespace eadem::test
