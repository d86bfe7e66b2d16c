// SPDX-License-Identifier: Apache-2.0
//
// Which parts of a graph become a fusion, and the reasons recorded for the others.
#include <gtest/gtest.h>

#include "eadem/core/device/cpu_device.h"
#include "eadem/ops/all_ops.h"
#include "eadem/pipeline/passes/fusion.h"
#include "eadem/pipeline/passes/type_inference.h"

namespace eadem::pipeline {
namespace {

constexpr int64_t kHidden = 8;

// A graph under construction, whose ops are called by name.
struct Builder {
  Graph graph;

  ValueId input(const char* name) { return graph.add_input(name, TensorType(DType::f32, {Symbol::tokens, kHidden})); }
  ValueId vector(const char* name) { return graph.add_parameter(name, TensorType(DType::f32, {kHidden})); }
  ValueId linear(ValueId x, const char* weight, ValueId bias = kNoValue, DType out_dtype = DType::f32) {
    const ValueId w = graph.add_parameter(weight, TensorType(DType::f32, {kHidden, kHidden}));
    return graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias != kNoValue, out_dtype}), {x, w, bias});
  }
  ValueId add(ValueId a, ValueId b) { return graph.add1(std::make_shared<ops::Add>(), {a, b}); }
  ValueId norm(ValueId x) {
    return graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{}), {x, vector("norm")});
  }
  ValueId gated(ValueId gate, ValueId up) {
    return graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{}), {gate, up});
  }
  ValueId loss(ValueId logits) {
    const auto found = graph.find("labels");
    const ValueId labels = found ? *found : graph.add_input("labels", TensorType(DType::i32, {Symbol::tokens}));
    return graph.add1(std::make_shared<ops::CrossEntropy>(), {logits, labels});
  }
  void output(ValueId value) { graph.mark_output(fmt::format("y{}", graph.outputs().size()), value); }
};

std::vector<FusionDecision> run_fuse(Graph& graph, FusionOptions options = {}) {
  static const CpuDevice device({.num_threads = 1});
  SymbolValues bounds;
  bounds[Symbol::tokens] = 16;
  infer_types(graph);
  std::vector<FusionDecision> decisions = fuse(graph, device, bounds, options);
  // Whatever was replaced: every value is still made before it is read.
  std::vector<bool> made(graph.values().size());
  for (size_t v = 0; v < made.size(); ++v) made[v] = graph.values()[v].kind != Value::Kind::activation;
  for (const Node& node : graph.nodes()) {
    for (ValueId id : node.inputs) EXPECT_TRUE(id == kNoValue || made[static_cast<size_t>(id)]) << describe(node);
    for (ValueId id : node.outputs) made[static_cast<size_t>(id)] = true;
  }
  for (const GraphOutput& output : graph.outputs()) EXPECT_TRUE(made[static_cast<size_t>(output.value)]);
  return decisions;
}

std::vector<std::string> op_names(const Graph& graph) {
  std::vector<std::string> names;
  for (const Node& node : graph.nodes()) names.emplace_back(node.op->name());
  return names;
}

using Names = std::vector<std::string>;

TEST(Matching, LinearAddInEitherOrderWithAndWithoutBias) {
  for (const bool exchanged : {false, true})
    for (const bool bias : {false, true}) {
      Builder b;
      const ValueId x = b.input("x"), residual = b.input("residual");
      const ValueId product = b.linear(x, "w", bias ? b.vector("bias") : kNoValue);
      b.output(exchanged ? b.add(residual, product) : b.add(product, residual));
      const std::vector<FusionDecision> decisions = run_fuse(b.graph);
      ASSERT_EQ(op_names(b.graph), Names{"linear_add"});
      const Node& node = b.graph.nodes()[0];
      EXPECT_EQ(node.inputs[0], x);
      EXPECT_EQ(node.inputs[2], bias ? *b.graph.find("bias") : kNoValue);
      EXPECT_EQ(node.inputs[3], residual);
      ASSERT_EQ(decisions.size(), 1u);
      EXPECT_EQ(decisions[0].fusion, "linear_add");
      EXPECT_TRUE(decisions[0].applied);
      EXPECT_EQ(decisions[0].reason, "");
    }
}

TEST(Matching, AValueThatIsUsedElsewhereStays) {
  Builder b;
  const ValueId x = b.input("x");
  const ValueId product = b.linear(x, "w");
  b.output(b.add(product, x));
  b.output(b.norm(product));
  EXPECT_TRUE(run_fuse(b.graph).empty());
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "add", "rms_norm"}));
}

TEST(Matching, AGraphOutputInTheMiddleStays) {
  Builder b;
  const ValueId x = b.input("x");
  const ValueId product = b.linear(x, "w");
  b.output(product);
  b.output(b.add(product, x));
  EXPECT_TRUE(run_fuse(b.graph).empty());
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "add"}));
}

TEST(Matching, TheOtherOperandIsTriedWhenTheFirstIsUsedElsewhere) {
  Builder b;
  const ValueId x = b.input("x");
  const ValueId first = b.linear(x, "w1"), second = b.linear(x, "w2");
  b.output(b.add(first, second));
  b.output(first);
  run_fuse(b.graph);
  ASSERT_EQ(op_names(b.graph), (Names{"linear", "linear_add"}));
  EXPECT_EQ(b.graph.nodes()[1].inputs[1], *b.graph.find("w2"));
  EXPECT_EQ(b.graph.nodes()[1].inputs[3], first);
}

TEST(Matching, AValueAddedToItselfIsNoResidual) {
  Builder b;
  const ValueId product = b.linear(b.input("x"), "w");
  b.output(b.add(product, product));
  EXPECT_TRUE(run_fuse(b.graph).empty());
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "add"}));
}

TEST(Matching, RotatedKeysThatAreAlsoTheValuesStay) {
  Graph graph;
  const TensorType kv(DType::f32, {Symbol::tokens, 2, 8}), cache(DType::f32, {3, 2, 4, 8});
  const ValueId k = graph.add_input("k", kv);
  const ValueId table = graph.add_input("table", TensorType(DType::f32, {Symbol::tokens, 8}));
  const ValueId slots = graph.add_input("slots", TensorType(DType::i64, {Symbol::tokens}));
  const ValueId rotated =
      graph.add1(std::make_shared<ops::Rope>(kernels::RopeAttrs{kernels::RopeStyle::rotate_half, 8}), {k, table});
  graph.add(std::make_shared<ops::KvAppend>(),
            {rotated, rotated, slots, graph.add_state("cache_k", cache), graph.add_state("cache_v", cache)});
  EXPECT_TRUE(run_fuse(graph).empty());
  EXPECT_EQ(op_names(graph), (Names{"rope", "kv_append"}));
}

TEST(Matching, GatedActivationTakesBothLinearsInAnyProgramOrder) {
  for (const bool up_first : {false, true}) {
    Builder b;
    const ValueId x = b.input("x");
    ValueId gate = kNoValue, up = kNoValue;
    if (up_first) up = b.linear(x, "up");
    gate = b.linear(x, "gate");
    if (!up_first) up = b.linear(x, "up");
    b.output(b.gated(gate, up));
    run_fuse(b.graph);
    ASSERT_EQ(op_names(b.graph), Names{"linear_gated_activation"});
    EXPECT_EQ(b.graph.nodes()[0].inputs, (std::vector{x, *b.graph.find("gate"), *b.graph.find("up")}));
  }
}

TEST(Matching, GatedActivationNeedsOneInputAndNoBias) {
  {
    Builder b;
    const ValueId x = b.input("x");
    b.output(b.gated(b.linear(x, "gate", b.vector("bias")), b.linear(x, "up")));
    EXPECT_TRUE(run_fuse(b.graph).empty());
  }
  {
    Builder b;
    b.output(b.gated(b.linear(b.input("x"), "gate"), b.linear(b.input("z"), "up")));
    EXPECT_TRUE(run_fuse(b.graph).empty());
  }
  {
    Builder b;
    const ValueId one = b.linear(b.input("x"), "gate");
    b.output(b.gated(one, one));
    EXPECT_TRUE(run_fuse(b.graph).empty());
    EXPECT_EQ(op_names(b.graph), (Names{"linear", "gated_activation"}));
  }
}

TEST(Matching, TwoMatchesThatShareANodeAreNone) {
  // Both gated activations read the same gate: its linear cannot disappear into either.
  Builder b;
  const ValueId x = b.input("x");
  const ValueId gate = b.linear(x, "gate");
  b.output(b.gated(gate, b.linear(x, "up1")));
  b.output(b.gated(gate, b.linear(x, "up2")));
  for (const FusionDecision& decision : run_fuse(b.graph))
    EXPECT_EQ(decision.fusion, "linear_qkv");  // three linears of one input, which no CPU kernel computes together
  EXPECT_EQ(b.graph.nodes().size(), 5u);
}

TEST(Matching, OfTwoNormsOfOneSumTheFirstIsFused) {
  Builder b;
  const ValueId sum = b.add(b.input("a"), b.input("b"));
  const ValueId first = b.norm(sum), second = b.norm(sum);
  b.output(first);
  b.output(second);
  const std::vector<FusionDecision> decisions = run_fuse(b.graph);
  ASSERT_EQ(op_names(b.graph), (Names{"add_rms_norm", "rms_norm"}));
  EXPECT_EQ(b.graph.nodes()[0].outputs, (std::vector{sum, first}));
  EXPECT_EQ(b.graph.nodes()[1].inputs[0], sum);
  EXPECT_EQ(decisions.size(), 1u);
}

TEST(Matching, ASumThatIsReadBeforeItsNormIsNotMadeLater) {
  Builder b;
  const ValueId sum = b.add(b.input("a"), b.input("b"));
  b.output(b.linear(sum, "w"));
  b.output(b.norm(sum));
  run_fuse(b.graph);  // also sees that every value is made before it is read
  EXPECT_EQ(op_names(b.graph), (Names{"add_rms_norm", "linear"}));
}

TEST(Matching, ASumThatIsAGraphOutputIsKeptByAddRmsNorm) {
  Builder b;
  const ValueId sum = b.add(b.input("a"), b.input("b"));
  b.output(b.norm(sum));
  b.output(sum);
  run_fuse(b.graph);
  EXPECT_EQ(op_names(b.graph), Names{"add_rms_norm"});
}

// x -> linear -> + residual -> norm: both fusions want the addition.
Builder residual_block() {
  Builder b;
  const ValueId x = b.input("x");
  const Graph::Scope scope(b.graph, "layers.0", 0);
  b.output(b.norm(b.add(x, b.linear(x, "w"))));
  return b;
}

TEST(Matching, LinearAddComesBeforeAddRmsNorm) {
  Builder b = residual_block();
  const std::vector<FusionDecision> decisions = run_fuse(b.graph);
  EXPECT_EQ(op_names(b.graph), (Names{"linear_add", "rms_norm"}));
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].scope, "layers.0");
  EXPECT_EQ(b.graph.nodes()[0].scope, "layers.0");
  EXPECT_EQ(b.graph.nodes()[0].layer, 0);
}

TEST(Matching, AddRmsNormTakesTheAdditionThatLinearAddMayNotHave) {
  Builder b = residual_block();
  const std::vector<FusionDecision> decisions = run_fuse(b.graph, {.disabled = {"linear_add"}});
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "add_rms_norm"}));
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].fusion, "linear_add");
  EXPECT_FALSE(decisions[0].applied);
  EXPECT_EQ(decisions[0].reason, "switched off");
  EXPECT_EQ(decisions[1].fusion, "add_rms_norm");
  EXPECT_TRUE(decisions[1].applied);
}

TEST(Matching, AllSwitchesEveryFusionOff) {
  Builder b = residual_block();
  const std::vector<FusionDecision> decisions = run_fuse(b.graph, {.disabled = {"all"}});
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "add", "rms_norm"}));
  ASSERT_EQ(decisions.size(), 2u);  // each place once for each fusion that fits it
  for (const FusionDecision& decision : decisions) EXPECT_EQ(decision.reason, "switched off");
}

TEST(Matching, AnUnknownNameIsRefusedWithThoseThereAre) {
  Builder b = residual_block();
  try {
    run_fuse(b.graph, {.disabled = {"linear_sub"}});
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    for (const char* part : {"'linear_sub'", "all", "linear_add", "add_rms_norm", "linear_gated_activation",
                             "rope_append_attention", "rope_kv_append", "rope_qk_append", "linear_cross_entropy"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST(Matching, AttributesThatDoNotFitAreARefusal) {
  Builder b;
  const ValueId logits = b.linear(b.input("x"), "w", kNoValue, DType::bf16);
  b.output(b.loss(logits));
  const std::vector<FusionDecision> decisions = run_fuse(b.graph);
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "cross_entropy"}));
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_FALSE(decisions[0].applied);
  EXPECT_EQ(decisions[0].reason, "attributes of the matched ops do not fit");
}

TEST(Matching, ARefusalOfTheKernelsIsGivenInTheirWords) {
  // No CPU kernel computes bf16 activations.
  Builder b;
  const ValueId residual = b.graph.add_input("residual", TensorType(DType::bf16, {Symbol::tokens, kHidden}));
  b.output(b.add(b.linear(b.input("x"), "w", kNoValue, DType::bf16), residual));
  const std::vector<FusionDecision> decisions = run_fuse(b.graph);
  EXPECT_EQ(op_names(b.graph), (Names{"linear", "add"}));
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_FALSE(decisions[0].applied);
  EXPECT_NE(decisions[0].reason.find("linear_add"), std::string::npos) << decisions[0].reason;
  EXPECT_NE(decisions[0].reason.find("bf16"), std::string::npos) << decisions[0].reason;
}

TEST(Matching, ModeDecidesWhichFusionsAreTried) {
  for (const bool training : {false, true}) {
    Builder b;
    const ValueId x = b.input("x");
    b.output(b.loss(b.linear(b.norm(b.add(x, b.linear(x, "w"))), "lm_head")));
    run_fuse(b.graph, {.training = training});
    EXPECT_EQ(op_names(b.graph), training ? (Names{"linear", "add_rms_norm", "linear_cross_entropy"})
                                          : (Names{"linear_add", "rms_norm", "linear_cross_entropy"}));
  }
}

// The fused op stands before the first reader of what it makes. No CPU kernel computes it, so the refusal shows that it
// was found.
TEST(Matching, LinearsOfOneInputAreFoundThroughIt) {
  Builder b;
  const ValueId x = b.input("x"), q = b.linear(x, "q"), rotated = b.add(q, q), k = b.linear(x, "k");
  const ValueId v = b.linear(x, "v");
  for (const ValueId value : {rotated, k, v}) b.output(value);
  const std::vector<FusionDecision> decisions = run_fuse(b.graph);
  const auto found = std::find_if(decisions.begin(), decisions.end(),
                                  [](const FusionDecision& d) { return d.fusion == "linear_qkv"; });
  ASSERT_NE(found, decisions.end());
  EXPECT_FALSE(found->applied);
  EXPECT_EQ(found->reason, "no kernel on cpu");
}

TEST(Matching, EveryPlaceOfAPatternIsFound) {
  Builder b;
  ValueId x = b.input("x");
  for (int layer = 0; layer < 5; ++layer) {
    const ValueId gate = b.linear(x, "gate"), up = b.linear(x, "up");
    x = b.add(x, b.linear(b.gated(gate, up), "down"));
  }
  b.output(x);
  const std::vector<FusionDecision> decisions = run_fuse(b.graph);
  EXPECT_EQ(decisions.size(), 10u);
  Names expected;
  for (int layer = 0; layer < 5; ++layer) expected.insert(expected.end(), {"linear_gated_activation", "linear_add"});
  EXPECT_EQ(op_names(b.graph), expected);
}

}  // namespace
}  // namespace eadem::pipeline
