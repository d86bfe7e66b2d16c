// SPDX-License-Identifier: Apache-2.0
//
// The references themselves on numbers worked out by hand, and their costs. Everything else is measured against them.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "eadem/ops/all_ops.h"
#include "tests/support/compare.h"
#include "tests/support/values.h"

namespace eadem::test {
namespace {

using kernels::Pass;

constexpr DType kF32 = DType::f32;

// The op's outputs of one inference pass.
std::vector<RefTensor> infer(const ops::Op& op, const std::vector<RefTensor>& inputs,
                             const std::vector<Shape>& shapes) {
  std::vector<RefTensor> outputs;
  for (const Shape& shape : shapes) outputs.push_back(zeros(shape));
  op.reference(Pass::inference, inputs, outputs);
  return outputs;
}

RefTensor tensor(const Shape& shape, std::vector<double> values) { return {shape, std::move(values)}; }

TEST(Reference, EmbeddingCopiesRows) {
  const auto y =
      infer(ops::Embedding({kF32, 3}), {tensor({3, 2}, {0, 1, 10, 11, 20, 21}), tensor({2}, {2, 0})}, {{2, 2}});
  EXPECT_CLOSE(y[0], tensor({2, 2}, {20, 21, 0, 1}), Tolerance::exact());
}

TEST(Reference, LinearIsRowTimesWeightTransposed) {
  const auto y =
      infer(ops::Linear({true, kF32}),
            {tensor({1, 2}, {1, 2}), tensor({3, 2}, {1, 0, 0, 1, 3, 4}), tensor({3}, {10, 20, 30})}, {{1, 3}});
  EXPECT_CLOSE(y[0], tensor({1, 3}, {11, 22, 41}), Tolerance::exact());
}

TEST(Reference, RmsNorm) {
  const auto y = infer(ops::RmsNorm({0}), {tensor({1, 2}, {3, 4}), tensor({2}, {1, 2})}, {{1, 2}});
  const double rms = std::sqrt(12.5);
  EXPECT_CLOSE(y[0], tensor({1, 2}, {3 / rms, 8 / rms}), Tolerance::absolute(1e-15));
}

TEST(Reference, RopeRotatesPairs) {
  // A quarter turn of the first pair, none of the second; the fifth element is beyond rotary_dim.
  const RefTensor x = tensor({1, 1, 5}, {1, 2, 3, 4, 5}), table = tensor({1, 4}, {0, 1, 1, 0});
  EXPECT_CLOSE(infer(ops::Rope({kernels::RopeStyle::rotate_half, 4}), {x, table}, {{1, 1, 5}})[0],
               tensor({1, 1, 5}, {-3, 2, 1, 4, 5}), Tolerance::exact());
  EXPECT_CLOSE(infer(ops::Rope({kernels::RopeStyle::interleaved, 4}), {x, table}, {{1, 1, 5}})[0],
               tensor({1, 1, 5}, {-2, 1, 3, 4, 5}), Tolerance::exact());
}

TEST(Reference, RopeTable) {
  const auto table = infer(ops::RopeTable({2.0f}), {tensor({2}, {0, 3}), tensor({1}, {0.5})}, {{2, 2}});
  EXPECT_CLOSE(table[0], tensor({2, 2}, {2, 0, 2 * std::cos(1.5), 2 * std::sin(1.5)}), Tolerance::absolute(1e-15));
}

TEST(Reference, AttentionIsCausalWindowedAndPerSequence) {
  // Zero queries: every visible value weighs the same. Sequences of two and one tokens.
  const RefTensor q = zeros({3, 1, 1}), k = zeros({3, 1, 1}), v = tensor({3, 1, 1}, {2, 4, 9}),
                  start = tensor({3}, {0, 2, 3}), length = tensor({2}, {2, 1});
  const auto run = [&](int64_t window) {
    return infer(ops::Attention({1, 1, 1, 1.0f, window, kernels::KvSource::direct}), {q, k, v, start, length, {}},
                 {{3, 1, 1}})[0];
  };
  EXPECT_CLOSE(run(0), tensor({3, 1, 1}, {2, 3, 9}), Tolerance::absolute(1e-15));
  EXPECT_CLOSE(run(1), tensor({3, 1, 1}, {2, 4, 9}), Tolerance::absolute(1e-15));
}

TEST(Reference, AttentionByChunksIsNotAWindow) {
  // Zero queries: every visible value weighs the same. Chunks of two; the third token sees itself alone.
  const RefTensor q = zeros({4, 1, 1}), k = zeros({4, 1, 1}), v = tensor({4, 1, 1}, {2, 4, 9, 1}),
                  start = tensor({2}, {0, 4}), length = tensor({1}, {4});
  const auto y = infer(ops::Attention({1, 1, 1, 1.0f, 0, kernels::KvSource::direct, 0, 0.0f, false, 2}),
                       {q, k, v, start, length, {}}, {{4, 1, 1}})[0];
  EXPECT_CLOSE(y, tensor({4, 1, 1}, {2, 3, 9, 5}), Tolerance::absolute(1e-15));
}

// transformers: log1p(floor((position + 1) / floor_scale)) * attn_scale + 1 of Llama 4, and of Mistral 4
// 1 + beta * log(1 + floor(position / length)).
TEST(Reference, ScaleByPosition) {
  const RefTensor x = tensor({4, 1, 1}, {1, 1, 2, 1}), positions = tensor({4}, {0, 3, 4, 9});
  const auto y = [&](bool plus_one) {
    return infer(ops::ScaleByPosition({0.5f, 5, plus_one}), {x, positions}, {{4, 1, 1}})[0];
  };
  EXPECT_CLOSE(y(true), tensor({4, 1, 1}, {1, 1, 2 + std::log(2.0), 1 + 0.5 * std::log(3.0)}),
               Tolerance::absolute(1e-15));
  EXPECT_CLOSE(y(false), tensor({4, 1, 1}, {1, 1, 2, 1 + 0.5 * std::log(2.0)}), Tolerance::absolute(1e-15));
}

TEST(Reference, AttentionReadsItsBlocks) {
  // One sequence of three positions in blocks 2 and 0 of size 2; the query is its last token.
  const RefTensor q = zeros({1, 1, 1}), k = zeros({3, 1, 2, 1}), v = tensor({3, 1, 2, 1}, {6, 100, 100, 100, 1, 2});
  const auto y = infer(ops::Attention({1, 1, 1, 1.0f, 0, kernels::KvSource::cached}),
                       {q, k, v, tensor({2}, {0, 1}), tensor({1}, {3}), tensor({1, 2}, {2, 0})}, {{1, 1, 1}});
  EXPECT_CLOSE(y[0], tensor({1, 1, 1}, {3}), Tolerance::absolute(1e-15));
}

TEST(Reference, KvAppendWritesSlotsOnly) {
  std::vector<RefTensor> caches = {tensor({2, 1, 2, 1}, {1, 2, 3, 4}), tensor({2, 1, 2, 1}, {5, 6, 7, 8})};
  const std::vector<RefTensor> in = {tensor({2, 1, 1}, {-1, -2}), tensor({2, 1, 1}, {-3, -4}), tensor({2}, {3, 0}),
                                     caches[0], caches[1]};
  ops::KvAppend().reference(Pass::inference, in, caches);
  EXPECT_CLOSE(caches[0], tensor({2, 1, 2, 1}, {-2, 2, 3, -1}), Tolerance::exact());
  EXPECT_CLOSE(caches[1], tensor({2, 1, 2, 1}, {-4, 6, 7, -3}), Tolerance::exact());
}

TEST(Reference, ShortConvolutionGoesOnWhereItsStateEnds) {
  // Taps 1, 10, 100 on the tokens 1, 2, 3, 4 of one sequence and 5 of another, whole and cut after two tokens.
  const RefTensor weight = tensor({3, 1}, {1, 10, 100});
  const auto whole =
      infer(ops::ShortConvolution({3}),
            {tensor({5, 1}, {1, 2, 3, 4, 5}), weight, tensor({1}, {0.5}), tensor({3}, {0, 4, 5})}, {{5, 1}});
  EXPECT_CLOSE(whole[0], tensor({5, 1}, {100.5, 210.5, 321.5, 432.5, 500.5}), Tolerance::exact());
  std::vector<RefTensor> out = {zeros({2, 1}), tensor({2, 2, 1}, {7, 8, 0, 0})};
  const auto step = [&](std::vector<double> x) {
    ops::ShortConvolution({3, false, true})
        .reference(Pass::inference,
                   std::vector{tensor({2, 1}, std::move(x)), weight, RefTensor{}, tensor({2}, {0, 2}), tensor({1}, {1}),
                               out[1]},
                   out);
    return out[0];
  };
  EXPECT_CLOSE(step({1, 2}), tensor({2, 1}, {100, 210}), Tolerance::exact());
  EXPECT_CLOSE(step({3, 4}), tensor({2, 1}, {321, 432}), Tolerance::exact());
  EXPECT_CLOSE(out[1], tensor({2, 2, 1}, {7, 8, 3, 4}), Tolerance::exact());
}

TEST(Reference, GatedDeltaRuleFadesCorrectsAndReads) {
  // One row and one column, so that q and k are 1 but for their signs. Decay and beta are 1/2 each: with a = b = 0 and
  // no bias, g = -exp(a_log) log 2 with a_log = 0.
  const kernels::GatedDeltaRuleAttrs attrs{
      .key_heads = 1, .value_heads = 1, .key_dim = 1, .value_dim = 1, .eps = 1e-30f};
  const RefTensor zero = zeros({3, 1}), one = tensor({1}, {0});
  const auto y = infer(ops::GatedDeltaRule(attrs),
                       {tensor({3, 1, 1}, {2, 2, -3}), tensor({3, 1, 1}, {5, -1, 1}), tensor({3, 1, 1}, {4, 6, 7}),
                        zero, zero, one, one, tensor({3}, {0, 2, 3})},
                       {{3, 1, 1}})[0];
  // S = 4 / 2; S = 1 faded, read with the key -1 as -1: d = (6 + 1) / 2, S = 1 - 3.5. The third begins anew: S = 7 / 2.
  EXPECT_CLOSE(y, tensor({3, 1, 1}, {2, -2.5, -3.5}), Tolerance::absolute(1e-12));
}

TEST(Reference, SoftmaxAndCrossEntropy) {
  const RefTensor logits = tensor({2, 2}, {0, std::log(3.0), 1000, 1000});
  EXPECT_CLOSE(infer(ops::Softmax(), {logits}, {{2, 2}})[0], tensor({2, 2}, {0.25, 0.75, 0.5, 0.5}),
               Tolerance::absolute(1e-15));
  EXPECT_CLOSE(infer(ops::CrossEntropy(), {logits, tensor({2}, {0, -1})}, {{2}})[0], tensor({2}, {std::log(4.0), 0}),
               Tolerance::absolute(1e-15));
}

TEST(Reference, LoadBalancingLossOfAllLayersTogether) {
  // Probabilities (1/4, 3/4) three times and (1/2, 1/2) once, of which the lower number is chosen: the fractions are
  // (1/4, 3/4) and the means (5/16, 11/16).
  const double log3 = std::log(3.0);
  EXPECT_CLOSE(infer(ops::LoadBalancingLoss(2, {.top_k = 1}),
                     {tensor({2, 2}, {0, log3, 0, log3}), tensor({2, 2}, {0, log3, 0, 0})}, {{1}})[0],
               tensor({1}, {2 * (1 * 5 + 3 * 11) / 64.0}), Tolerance::absolute(1e-15));
}

TEST(Reference, ActivationsAtKnownPoints) {
  using enum kernels::ActivationKind;
  const auto at = [](kernels::ActivationKind kind, double x) {
    return infer(ops::Activation({kind}), {tensor({1}, {x})}, {{1}})[0].data[0];
  };
  EXPECT_NEAR(at(silu, 1), 0.7310585786300049, 1e-15);
  EXPECT_NEAR(at(gelu, 1), 0.8413447460685429, 1e-15);
  EXPECT_NEAR(at(gelu_tanh, 1), 0.8411919906082768, 1e-15);
  EXPECT_EQ(at(relu, -2), 0);
  EXPECT_EQ(at(relu2, 3), 9);
}

TEST(Reference, AdamWAndGradNorm) {
  EXPECT_CLOSE(infer(ops::GradNorm(2), {tensor({2}, {3, 0}), tensor({1}, {4})}, {{1}})[0], tensor({1}, {5}),
               Tolerance::exact());
  // One step from zero moments: the bias-corrected moments are g and g^2, so the step is lr * sign(g), plus decay.
  std::vector<RefTensor> state = {tensor({1}, {2}), tensor({1}, {0}), tensor({1}, {0}), {}};
  const std::vector<RefTensor> in = {tensor({1}, {-8}),
                                     tensor({1}, {4}),
                                     tensor({8}, {0.1, 0.9, 0.99, 0, 0.5, 0.1, 0.01, 2}),
                                     state[0],
                                     state[1],
                                     state[2],
                                     {}};
  ops::AdamW({true}).reference(Pass::inference, in, state);
  EXPECT_NEAR(state[0].data[0], 2 - 0.1 * (-1 + 0.5 * 2), 1e-12);
  EXPECT_NEAR(state[1].data[0], 0.1 * -4, 1e-6);  // clipped to half
}

TEST(Cost, LinearAndEmbedding) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = 10;
  const ops::Linear linear({false, kF32});
  const TensorType types[] = {TensorType(kF32, {Symbol::tokens, 64}), TensorType(DType::bf16, {32, 64}),
                              kernels::unconnected_port()};
  const std::vector<TensorType> out = linear.infer_types(types);
  const ops::Cost forward = linear.cost(Pass::inference, types, out, symbols);
  EXPECT_EQ(forward.flops, 2.0 * 10 * 64 * 32);
  EXPECT_EQ(forward.bytes, 4.0 * 10 * 64 + 2.0 * 32 * 64 + 4.0 * 10 * 32);
  const ops::Cost backward = linear.cost(Pass::backward, types, out, symbols);
  EXPECT_EQ(backward.flops, 2 * forward.flops);
  // x, weight and dy read; dx written; dweight, f32, read and written.
  EXPECT_EQ(backward.bytes, forward.bytes + 4.0 * 10 * 64 + 2 * 4.0 * 32 * 64);

  const ops::Embedding embedding({kF32, 100000});
  const TensorType table[] = {TensorType(DType::bf16, {100000, 64}), TensorType(DType::i32, {Symbol::tokens})};
  EXPECT_EQ(embedding.cost(Pass::inference, table, embedding.infer_types(table), symbols).bytes,
            10 * 4 + 10 * 64 * 2.0 + 10 * 64 * 4.0)
      << "rows read, not the table";
}

TEST(Cost, EveryWorkloadRowHasTypesAndACost) {
  const std::vector<ops::Workload> rows = ops::all_workloads();
  EXPECT_GT(rows.size(), 200u);
  std::set<std::string> names;
  for (const ops::Workload& row : rows) {
    SCOPED_TRACE(row.name);
    EXPECT_TRUE(names.insert(fmt::format("{} {}", row.op->name(), row.name)).second) << "a name of its own";
    const std::vector<TensorType> out = row.op->infer_types(row.inputs);
    EXPECT_GT(row.op->cost(Pass::inference, row.inputs, out, row.symbols).bytes, 0);
    if (row.op->has_backward() && !row.op->passes_gradient_through()) {
      EXPECT_GT(row.op->cost(Pass::backward, row.inputs, out, row.symbols).bytes, 0);
    }
  }
}

TEST(Cost, AttentionCountsWhatIsSeen) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = 8;
  symbols[Symbol::sequences] = 2;
  const TensorType kv(kF32, {Symbol::tokens, 1, 4});
  const std::vector<TensorType> types = {kv,
                                         kv,
                                         kv,
                                         TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                                         TensorType(DType::i32, {Symbol::sequences}),
                                         kernels::unconnected_port()};
  const auto flops = [&](int64_t window) {
    const ops::Attention op({1, 1, 4, 1.0f, window, kernels::KvSource::direct});
    return op.cost(Pass::inference, types, op.infer_types(types), symbols).flops;
  };
  EXPECT_EQ(flops(0), 2 * 10 * (4.0 * 4 + 13));  // 1 + 2 + 3 + 4 pairs in each sequence
  EXPECT_EQ(flops(1), 2 * 4 * (4.0 * 4 + 13));
}

}  // namespace
}  // namespace eadem::test
