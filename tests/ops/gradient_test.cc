// SPDX-License-Identifier: Apache-2.0
//
// The backward references against central differences of the forward references, both in double: every op with a
// backward pass, every input that has a gradient.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "eadem/ops/all_ops.h"
#include "tests/support/values.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace gradient_test {

using kernels::ActivationKind;
using kernels::Pass;
using ops::Saved;

std::set<std::string> checked;  // names of the ops of the test that runs

// sum over the outputs of weight * y (of those that are no indices), and the outputs with their extra tensors.
double loss(const ops::Op& op, std::span<const RefTensor> inputs, std::span<const RefTensor> weights,
            std::vector<RefTensor>& outputs) {
  op.reference(Pass::forward, inputs, outputs);
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i)
    for (size_t j = 0; j < weights[i].data.size(); ++j) sum += weights[i].data[j] * outputs[i].data[j];
  return sum;
}

// Central difference over h: truncation h^2 |f'''| / 6, and the roundings of two sums over 2h. With h = 2^-17, third
// derivatives below 2^10 and losses below 2^6 of at most 2^8 terms, 2^-26 + 2^(6 + 8 - 53 + 16) = 2^-26 + 2^-23.
constexpr double kStep = 0x1p-17, kBound = 0x1p-22;

double central_difference(double& value, const std::function<double()>& loss_of) {
  const double original = value;
  value = original + kStep;
  const double above = loss_of();
  value = original - kStep;
  const double below = loss_of();
  value = original;
  return (above - below) / (2 * kStep);
}

void check_gradients(const ops::Op& op, const std::vector<TensorType>& types, const SymbolValues& symbols,
                     std::vector<RefTensor> inputs) {
  SCOPED_TRACE(fmt::format("{} {}", op.name(), op.attrs_text()));
  ASSERT_TRUE(op.has_backward());
  checked.insert(std::string(op.name()));
  const std::vector<TensorType> output_types = op.infer_types(types);
  std::vector<RefTensor> weights, outputs;
  const std::vector<ops::Port> output_ports = op.outputs();
  for (size_t i = 0; i < output_types.size(); ++i) {
    const Shape shape = output_types[i].bind(symbols);
    weights.push_back(output_ports[i].role == ops::Port::Role::index
                          ? zeros(shape)
                          : widen(workloads::random_tensor(DType::f32, shape, 31 + i).view));
    outputs.push_back(zeros(shape));
  }
  for (const TensorType& extra : op.extra_types(types)) outputs.push_back(zeros(extra.bind(symbols)));
  loss(op, inputs, weights, outputs);

  std::vector<RefTensor> backward_inputs, gradients;
  for (const Saved& saved : op.saved()) {
    const auto index = static_cast<size_t>(saved.index);
    backward_inputs.push_back(saved.kind == Saved::Kind::input    ? inputs[index]
                              : saved.kind == Saved::Kind::output ? outputs[index]
                                                                  : outputs[output_types.size() + index]);
  }
  for (size_t i = 0; i < weights.size(); ++i)
    if (output_ports[i].role != ops::Port::Role::index) backward_inputs.push_back(weights[i]);
  const std::vector<int> differentiable = op.differentiable_inputs();
  ASSERT_FALSE(differentiable.empty());
  // Parameter gradients accumulate: start from something, and expect it back on top.
  constexpr double kBefore = 0.25;
  const std::vector<ops::Port> ports = op.inputs();
  for (int index : differentiable) {
    const RefTensor& input = inputs[static_cast<size_t>(index)];
    gradients.push_back(input.data.empty() ? RefTensor{} : zeros(input.shape));
    if (ports[static_cast<size_t>(index)].role == ops::Port::Role::parameter)
      for (double& value : gradients.back().data) value = kBefore;
  }
  op.reference(Pass::backward, backward_inputs, gradients);

  for (size_t slot = 0; slot < differentiable.size(); ++slot) {
    const auto index = static_cast<size_t>(differentiable[slot]);
    const bool parameter = ports[index].role == ops::Port::Role::parameter;
    std::vector<double>& values = inputs[index].data;
    for (size_t i = 0; i < values.size(); ++i) {
      const double numeric = central_difference(values[i], [&] { return loss(op, inputs, weights, outputs); });
      EXPECT_NEAR(gradients[slot].data[i] - (parameter ? kBefore : 0), numeric, kBound)
          << "input '" << ports[index].name << "' element " << i;
    }
  }
}

void check_gradients(const ops::Op& op, const std::vector<TensorType>& types, SymbolValues symbols = {}) {
  check_gradients(op, types, symbols, widen(workloads::make_inputs(op, types, symbols, 77)));
}

SymbolValues step(int64_t tokens, int64_t sequences = 1) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  symbols[Symbol::sequences] = sequences;
  return symbols;
}

constexpr DType kF32 = DType::f32;

// The ops of each test.
const std::map<std::string, std::set<std::string>> kOps = {
    {"Embedding", {"embedding"}},
    {"Linear", {"linear"}},
    {"RmsNorm", {"rms_norm"}},
    {"LayerNorm", {"layer_norm"}},
    {"RmsNormOfGroups", {"rms_norm"}},
    {"StateSpaceScan", {"state_space_scan"}},
    {"Scale", {"scale"}},
    {"ScaleBy", {"scale_by"}},
    {"AddAndMul", {"add", "mul"}},
    {"Reshape", {"reshape"}},
    {"CastAndCollectives", {"cast", "all_reduce", "all_gather"}},
    {"TensorParallel", {"add_bias", "select_heads"}},
    {"Activations", {"activation", "gated_activation"}},
    {"Rope", {"rope"}},
    {"ScaleByPosition", {"scale_by_position"}},
    {"Attention", {"attention"}},
    {"SelectedAttention", {"selected_attention"}},
    {"CompressKeys", {"compress_keys"}},
    {"CompressedAttention", {"compressed_attention"}},
    {"PoolKeys", {"pool_keys"}},
    {"PooledAttention", {"pooled_attention"}},
    {"Streams", {"stream_weights", "collapse_streams", "expand_streams"}},
    {"LatentAttention", {"attention", "head_linear", "split_columns", "concat_columns"}},
    {"ShortConvolution", {"short_convolution"}},
    {"GatedDeltaRule", {"gated_delta_rule"}},
    {"Experts",
     {"route", "load_balancing_loss", "permute", "unpermute", "grouped_linear", "clamped_swiglu", "gate_rows",
      "identity_experts"}},
    {"ExpertExchangeOnOneRank", {"expert_dispatch", "expert_combine"}},
    {"SoftmaxAndCrossEntropy", {"softmax", "cross_entropy"}},
    {"ParallelCrossEntropy", {"parallel_cross_entropy"}}};

class Gradient : public testing::Test {
 protected:
  void SetUp() override { checked.clear(); }
  void TearDown() override {
    EXPECT_EQ(checked, kOps.at(testing::UnitTest::GetInstance()->current_test_info()->name()));
  }
};

TEST(GradientTests, AreOfEveryOpWithABackwardPass) {
  std::set<std::string> ops;
  for (const auto& [test, names] : kOps) ops.insert(names.begin(), names.end());
  for (const ops::Workload& row : ops::all_workloads())
    EXPECT_TRUE(!row.op->has_backward() || ops.contains(std::string(row.op->name()))) << row.op->name();
}

TEST_F(Gradient, Embedding) {
  check_gradients(ops::Embedding({kF32, 5}), {TensorType(kF32, {5, 3}), TensorType(DType::i32, {Symbol::tokens})},
                  step(7));
}

TEST_F(Gradient, Linear) {
  const TensorType x(kF32, {Symbol::tokens, 5}), weight(kF32, {4, 5});
  check_gradients(ops::Linear({false, kF32}), {x, weight, kernels::unconnected_port()}, step(3));
  check_gradients(ops::Linear({true, kF32}), {x, weight, TensorType(kF32, {4})}, step(3));
}

TEST_F(Gradient, RmsNorm) {
  check_gradients(ops::RmsNorm({1e-5f}), {TensorType(kF32, {Symbol::tokens, 2, 6}), TensorType(kF32, {6})}, step(3));
}

TEST_F(Gradient, LayerNorm) {
  const TensorType x(kF32, {Symbol::tokens, 2, 6}), weight(kF32, {6});
  check_gradients(ops::LayerNorm({1e-5f}), {x, weight, weight}, step(3));
  check_gradients(ops::LayerNorm({1e-5f}), {x, weight, kernels::unconnected_port()}, step(3));
}

TEST_F(Gradient, RmsNormOfGroups) {
  check_gradients(ops::RmsNorm({1e-5f}), {TensorType(kF32, {Symbol::tokens, 2, 6}), TensorType(kF32, {2, 6})}, step(3));
}

// dt lies on both sides of the limits.
TEST_F(Gradient, StateSpaceScan) {
  const TensorType shared(kF32, {Symbol::tokens, 2, 3}), each(kF32, {4});
  for (float dt_min : {0.0f, 0.5f})
    check_gradients(ops::StateSpaceScan({.dt_min = dt_min, .dt_max = dt_min == 0 ? HUGE_VALF : 2.0f}),
                    {TensorType(kF32, {Symbol::tokens, 4, 3}), TensorType(kF32, {Symbol::tokens, 4}), shared, shared,
                     each, each, each, TensorType(DType::i32, {Dim(Symbol::sequences, 1)})},
                    step(7, 2));
}

TEST_F(Gradient, Scale) {
  const TensorType x(kF32, {3, 4});
  check_gradients(ops::Scale({-0.3f}), {x});
  check_gradients(ops::Scale({1.5f, 0.8f}), {x});
}

TEST_F(Gradient, ScaleBy) {
  const TensorType x(kF32, {Symbol::tokens, 4});
  check_gradients(ops::ScaleBy({}), {x, TensorType(kF32, {1})}, step(3));
  check_gradients(ops::ScaleBy({true}), {x, TensorType(kF32, {5}), TensorType(DType::i32, {Symbol::tokens, 4})},
                  step(3));
}

TEST_F(Gradient, AddAndMul) {
  const TensorType x(kF32, {3, 4});
  check_gradients(ops::Add(), {x, x});
  check_gradients(ops::Mul(), {x, x});
}

TEST_F(Gradient, Reshape) { check_gradients(ops::Reshape({2, 3}), {TensorType(kF32, {4, 6})}); }

// Collectives of one rank.
TEST_F(Gradient, CastAndCollectives) {
  const TensorType x(kF32, {3, 4});
  check_gradients(ops::Cast({DType::bf16}), {x});
  check_gradients(ops::AllReduce(), {x});
  check_gradients(ops::AllGather({.ranks = 1, .dim = 1, .whole = 4}), {x});
}

TEST_F(Gradient, TensorParallel) {
  check_gradients(ops::AddBias(), {TensorType(kF32, {Symbol::tokens, 4}), TensorType(kF32, {4})}, step(3));
  check_gradients(ops::SelectHeads({.heads = 3, .own_heads = 4, .first_query = 2, .run = 1, .group = 2}),
                  {TensorType(kF32, {Symbol::tokens, 3, 2})}, step(3));
}

TEST_F(Gradient, Activations) {
  const TensorType x(kF32, {5, 9});
  for (ActivationKind kind : {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                              ActivationKind::relu, ActivationKind::relu2, ActivationKind::sigmoid}) {
    const ops::Activation plain({kind});
    std::vector<RefTensor> inputs = widen(workloads::make_inputs(plain, std::vector{x}, {}, 3));
    // relu has no derivative at 0 and relu2 no second one: keep the difference on one side.
    for (double& value : inputs[0].data)
      if (std::fabs(value) < 0.01) value = 0.5;
    check_gradients(plain, {x}, {}, inputs);
    inputs.push_back(widen(workloads::random_tensor(kF32, Shape{5, 9}, 4).view));
    check_gradients(ops::GatedActivation({kind}), {x, x}, {}, inputs);
  }
}

TEST_F(Gradient, Rope) {
  for (kernels::RopeStyle style : {kernels::RopeStyle::rotate_half, kernels::RopeStyle::interleaved})
    for (bool last : {false, true})
      check_gradients(ops::Rope({style, 6, last}),
                      {TensorType(kF32, {Symbol::tokens, 2, 8}), TensorType(kF32, {Symbol::tokens, 6})}, step(3));
}

TEST_F(Gradient, ScaleByPosition) {
  for (bool plus_one : {false, true})
    check_gradients(ops::ScaleByPosition({0.4f, 5, plus_one}),
                    {TensorType(kF32, {Symbol::tokens, 2, 3}), TensorType(DType::i32, {Symbol::tokens})}, step(4));
}

TEST_F(Gradient, Attention) {
  struct Case {
    int64_t window, value_dim;
    float softcap = 0.0f;
    bool sinks = false;
    int64_t chunk = 0;
  };
  for (const Case& c : {Case{0, 3},
                        {2, 3},
                        {0, 5},
                        {2, 1},
                        {0, 3, 1.5f},
                        {2, 5, 0.0f, true},
                        {0, 3, 1.5f, true},
                        {0, 3, 0.0f, false, 2},
                        {0, 5, 1.5f, true, 3}}) {
    const ops::Attention op(
        {4, 2, 3, 0.5f, c.window, kernels::KvSource::direct, c.value_dim, c.softcap, c.sinks, c.chunk});
    std::vector<TensorType> types = {
        TensorType(kF32, {Symbol::tokens, 4, 3}),           TensorType(kF32, {Symbol::tokens, 2, 3}),
        TensorType(kF32, {Symbol::tokens, 2, c.value_dim}), TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
        TensorType(DType::i32, {Symbol::sequences}),        kernels::unconnected_port()};
    if (c.sinks) types.emplace_back(kF32, std::initializer_list<Dim>{4});
    check_gradients(op, types, step(9, 3));
  }
}

TEST_F(Gradient, SelectedAttention) {
  for (const int64_t span : {1, 2})
    for (const int64_t value_dim : {3, 4, 6}) {
      const TensorType keys(kF32, {Symbol::tokens, 2, 4});
      check_gradients(
          ops::SelectedAttention(
              {.heads = 4, .kv_heads = 2, .head_dim = 4, .value_dim = value_dim, .scale = 0.5f, .span = span}),
          {TensorType(kF32, {Symbol::tokens, 4, 4}), keys,
           value_dim < 4 ? keys : TensorType(kF32, {Symbol::tokens, 2, value_dim}),
           TensorType(DType::i32, {Symbol::tokens, 2, 3}), TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
           TensorType(DType::i32, {Symbol::sequences}), kernels::unconnected_port()},
          step(9, 2));
    }
}

TEST_F(Gradient, CompressKeys) {
  for (const kernels::RowGrid& grid : {kernels::RowGrid{4, 2}, {3, 3}, {2, 1}})
    for (const bool weight : {false, true})
      for (const bool position : {false, true})
        check_gradients(ops::CompressKeys({.heads = 2, .width = 3, .grid = grid}),
                        {TensorType(kF32, {Symbol::tokens, 2, 3}),
                         weight ? TensorType(kF32, {2, grid.length}) : kernels::unconnected_port(),
                         position ? TensorType(kF32, {2, grid.length, 3}) : kernels::unconnected_port(),
                         TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                         TensorType(DType::i32, {Symbol::sequences}), kernels::unconnected_port()},
                        step(13, 2));
}

TEST_F(Gradient, CompressedAttention) {
  for (const kernels::RowGrid& grid : {kernels::RowGrid{4, 2}, {3, 3}, {2, 1}})
    for (const int64_t value_dim : {3, 5})
      check_gradients(
          ops::CompressedAttention(
              {.heads = 4, .kv_heads = 2, .head_dim = 3, .value_dim = value_dim, .scale = 0.5f, .grid = grid}),
          {TensorType(kF32, {Symbol::tokens, 4, 3}), TensorType(kF32, {Symbol::tokens, 2, 3}),
           TensorType(kF32, {Symbol::tokens, 2, value_dim}), TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
           TensorType(DType::i32, {Symbol::sequences}), kernels::unconnected_port()},
          step(13, 2));
}

TEST_F(Gradient, PoolKeys) {
  for (const int64_t parts : {1, 2})
    for (const int64_t stride : {1, 3}) {
      const TensorType x(kF32, {Symbol::tokens, 1, 2 * parts});
      check_gradients(ops::PoolKeys({.width = 2, .stride = stride, .parts = parts}),
                      {x, x, TensorType(kF32, {stride, 2 * parts}), TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                       TensorType(DType::i32, {Symbol::sequences}), kernels::unconnected_port()},
                      step(13, 2));
    }
}

TEST_F(Gradient, PooledAttention) {
  for (const int64_t selected : {0, 2}) {
    const TensorType keys(kF32, {Symbol::tokens, 1, 4});
    std::vector<TensorType> types = {TensorType(kF32, {Symbol::tokens, 3, 4}),
                                     keys,
                                     keys,
                                     TensorType(kF32, {3}),
                                     TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                                     TensorType(DType::i32, {Symbol::sequences}),
                                     kernels::unconnected_port()};
    if (selected > 0) types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::tokens, 1, selected});
    check_gradients(
        ops::PooledAttention({.heads = 3, .width = 4, .scale = 0.5f, .window = 3, .stride = 2, .selected = selected}),
        types, step(13, 2));
  }
}

// With many divisions and with few.
TEST_F(Gradient, Streams) {
  for (const bool merges : {false, true})
    for (const int64_t iterations : {1, 2, 20}) {
      const kernels::StreamWeightsAttrs attrs{.streams = 3, .iterations = iterations, .eps = 0.01f, .merges = merges};
      check_gradients(ops::StreamWeights(attrs),
                      {TensorType(kF32, {Symbol::tokens, attrs.width()}), TensorType(kF32, {attrs.width()}),
                       TensorType(kF32, {attrs.scales()})},
                      step(3));
    }
  const TensorType x(kF32, {Symbol::tokens, 3, 5}), weights(kF32, {Symbol::tokens, 15});
  check_gradients(ops::CollapseStreams(), {x, weights}, step(3));
  check_gradients(ops::ExpandStreams(), {x, TensorType(kF32, {Symbol::tokens, 5}), weights}, step(3));
}

// The first columns of a key are its value: both ports have gradients, which the graph adds up.
TEST_F(Gradient, LatentAttention) {
  const ops::Attention op({3, 1, 5, 0.5f, 0, kernels::KvSource::direct, 3});
  const TensorType row(kF32, {Symbol::tokens, 1, 5});
  check_gradients(
      op,
      {TensorType(kF32, {Symbol::tokens, 3, 5}), row, row, TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
       TensorType(DType::i32, {Symbol::sequences}), kernels::unconnected_port()},
      step(7, 2));
  check_gradients(ops::HeadLinear({kF32}), {TensorType(kF32, {Symbol::tokens, 3, 5}), TensorType(kF32, {3, 4, 5})},
                  step(4));
  check_gradients(ops::SplitColumns({2}), {TensorType(kF32, {Symbol::tokens, 3, 5})}, step(2));
  check_gradients(ops::ConcatColumns({2}),
                  {TensorType(kF32, {Symbol::tokens, 3, 2}), TensorType(kF32, {Symbol::tokens, 3, 4})}, step(2));
}

TEST_F(Gradient, ShortConvolution) {
  const TensorType x(kF32, {Symbol::tokens, 3}), weight(kF32, {3, 3}), bias(kF32, {3}),
      query_start(DType::i32, {Dim(Symbol::sequences, 1)});
  for (bool silu : {false, true}) {
    check_gradients(ops::ShortConvolution({3, silu}), {x, weight, bias, query_start}, step(9, 3));
    check_gradients(ops::ShortConvolution({3, silu}), {x, weight, kernels::unconnected_port(), query_start}, step(4));
  }
}

TEST_F(Gradient, GatedDeltaRule) {
  for (bool channels : {false, true}) {
    const kernels::GatedDeltaRuleAttrs attrs{.key_heads = 2,
                                             .value_heads = 4,
                                             .key_dim = 3,
                                             .value_dim = 2,
                                             .channel_decay = channels,
                                             .tiled = !channels,
                                             .eps = 0.1f};
    const TensorType q(kF32, {Symbol::tokens, 2, 3});
    check_gradients(ops::GatedDeltaRule(attrs),
                    {q, q, TensorType(kF32, {Symbol::tokens, 4, 2}), TensorType(kF32, {Symbol::tokens, attrs.decays()}),
                     TensorType(kF32, {Symbol::tokens, 4}), TensorType(kF32, {4}), TensorType(kF32, {attrs.decays()}),
                     TensorType(DType::i32, {Dim(Symbol::sequences, 1)})},
                    step(7, 2));
  }
}

TEST_F(Gradient, Experts) {
  using Scoring = kernels::RouteAttrs::Scoring;
  const TensorType logits(kF32, {Symbol::tokens, 5}), rows(DType::i32, {Symbol::tokens, 2});
  for (Scoring scoring : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrt_softplus})
    for (bool renormalize : {false, true})
      for (float least_sum : {0.0f, 100.0f}) {
        kernels::RouteAttrs attrs{2, scoring, renormalize, renormalize ? 0.1f : 0.0f, 1.5f, least_sum};
        check_gradients(ops::Route(attrs), {logits, kernels::unconnected_port()}, step(4));
        check_gradients(ops::Route(attrs), {logits, TensorType(kF32, {5})}, step(4));
        attrs.groups = 3, attrs.top_groups = 2, attrs.group_best = 2;
        check_gradients(ops::Route(attrs), {TensorType(kF32, {Symbol::tokens, 6}), kernels::unconnected_port()},
                        step(4));
      }
  for (Scoring scoring : {Scoring::sigmoid, Scoring::sqrt_softplus})
    check_gradients(
        ops::Route({.top_k = 3, .scoring = scoring, .renormalize = true, .by_token = true}),
        {logits, kernels::unconnected_port(), TensorType(kF32, {4, 3}), TensorType(DType::i32, {Symbol::tokens})},
        step(4));
  for (int layers : {1, 3})
    check_gradients(ops::LoadBalancingLoss(layers, {.top_k = 2}),
                    std::vector<TensorType>(static_cast<size_t>(layers), logits), step(4));
  const Dim pairs = 2 * Dim(Symbol::tokens);
  check_gradients(ops::Permute(), {TensorType(kF32, {Symbol::tokens, 3}), rows}, step(4));
  check_gradients(ops::Permute({.weighted = true}),
                  {TensorType(kF32, {Symbol::tokens, 3}), rows, TensorType(kF32, {Symbol::tokens, 2})}, step(4));
  check_gradients(ops::Unpermute(), {TensorType(kF32, {pairs, 3}), rows, TensorType(kF32, {Symbol::tokens, 2})},
                  step(4));
  check_gradients(ops::Unpermute({.weighted = false}), {TensorType(kF32, {pairs, 3}), rows}, step(4));
  check_gradients(ops::GroupedLinear({kF32}),
                  {TensorType(kF32, {pairs, 5}), TensorType(kF32, {3, 4, 5}), TensorType(DType::i32, {4}),
                   kernels::unconnected_port()},
                  step(4));
  check_gradients(ops::GroupedLinear({kF32}),
                  {TensorType(kF32, {pairs, 5}), TensorType(kF32, {3, 4, 5}), TensorType(DType::i32, {4}),
                   TensorType(kF32, {3, 4})},
                  step(4));
  const TensorType gate(kF32, {5, 9});
  check_gradients(ops::ClampedSwiglu({}), {gate, gate});
  check_gradients(ops::ClampedSwiglu({3.0f, 1.0f, 0.0f}), {gate, gate});
  for (const int64_t gates : {1, 2})
    check_gradients(ops::GateRows(), {TensorType(kF32, {Symbol::tokens, 6}), TensorType(kF32, {Symbol::tokens, gates})},
                    step(4));
  for (const int64_t first : {0, 4})
    check_gradients(ops::IdentityExperts({first}),
                    {TensorType(kF32, {Symbol::tokens, 6}), TensorType(DType::i32, {Symbol::tokens, 3}),
                     TensorType(kF32, {Symbol::tokens, 3})},
                    step(4));
}

TEST_F(Gradient, ExpertExchangeOnOneRank) {
  const kernels::ExpertExchangeAttrs attrs{.experts = 5, .top_k = 2};
  SymbolValues symbols = step(4);
  symbols[kernels::rank_tokens()] = 4;
  const TensorType offsets(DType::i32, {6});
  check_gradients(ops::ExpertDispatch(attrs), {TensorType(kF32, {2 * Dim(Symbol::tokens), 3}), offsets}, symbols);
  check_gradients(ops::ExpertCombine(attrs),
                  {TensorType(kF32, {2 * Dim(kernels::rank_tokens()), 3}), offsets, TensorType(DType::i32, {1, 5})},
                  symbols);
}

TEST_F(Gradient, SoftmaxAndCrossEntropy) {
  check_gradients(ops::Softmax(), {TensorType(kF32, {3, 7})});
  check_gradients(ops::CrossEntropy(), {TensorType(kF32, {6, 7}), TensorType(DType::i32, {6})});
}

// Two ranks have a part of the words each. The loss reads the logits through the states of both.
TEST_F(Gradient, ParallelCrossEntropy) {
  constexpr int64_t kRows = 5, kWords[] = {4, 3}, kState = kernels::kSoftmaxStateWords;
  RefTensor labels = zeros(Shape{kRows}), states = zeros(Shape{kRows, 2 * kState}), dloss = zeros(Shape{kRows});
  labels.data = {0, 3, 4, -1, 6};
  for (int64_t r = 0; r < kRows; ++r) dloss.data[static_cast<size_t>(r)] = 0.5 + 0.25 * static_cast<double>(r);
  std::vector<RefTensor> logits, losses = {zeros(Shape{kRows}), zeros(Shape{kRows})};  // the loss, and log(sum(exp))
  for (const int64_t words : kWords)
    logits.push_back(widen(workloads::random_tensor(kF32, Shape{kRows, words}, static_cast<uint64_t>(words)).view));
  const auto op_of = [&](size_t rank) {
    return ops::ParallelCrossEntropy(kernels::VocabularyPart{rank == 0 ? 0 : kWords[0]}, 2);
  };
  const auto loss_of = [&] {
    for (size_t rank = 0; rank < 2; ++rank) {
      std::vector<RefTensor> state = {zeros(Shape{kRows, kState})};
      ops::SoftmaxState(kernels::VocabularyPart{rank == 0 ? 0 : kWords[0]})
          .reference(Pass::inference, std::vector{logits[rank], labels}, state);
      for (size_t i = 0; i < state[0].data.size(); ++i)
        states.data[i / kState * 2 * kState + rank * kState + i % kState] = state[0].data[i];
    }
    op_of(0).reference(Pass::forward, std::vector{logits[0], labels, states}, losses);
    double sum = 0;
    for (size_t r = 0; r < dloss.data.size(); ++r) sum += dloss.data[r] * losses[0].data[r];
    return sum;
  };
  for (size_t rank = 0; rank < 2; ++rank) {
    loss_of();
    std::vector<RefTensor> gradient = {zeros(logits[rank].shape)};
    op_of(rank).reference(Pass::backward, std::vector{logits[rank], labels, losses[1], dloss}, gradient);
    checked.insert(std::string(op_of(rank).name()));
    for (size_t i = 0; i < logits[rank].data.size(); ++i)
      EXPECT_NEAR(gradient[0].data[i], central_difference(logits[rank].data[i], loss_of), kBound)
          << "rank " << rank << " element " << i;
  }
}

}  // namespace gradient_test
}  // namespace eadem::test
