// SPDX-License-Identifier: Apache-2.0
//
// Whole graphs compiled with every fusion, without one of them, and with none: the same bits on every instruction set
// of the CPU, in inference (in place, with states) and in training.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "eadem/core/device/cpu_device.h"
#include "eadem/ops/all_ops.h"
#include "eadem/pipeline/program.h"
#include "tests/support/values.h"
#include "tests/workloads/inputs.h"

namespace eadem::pipeline {
namespace {

using test::same_bits;

constexpr int64_t kHidden = 24, kHeadDim = 12, kFfn = 40, kVocab = 50, kBlocks = 6, kBlockSize = 4;
constexpr int64_t kMaxTokens = 19;

// A decoder layer without its attention, which no fusion touches, a norm after it and the loss of a head: every fusion
// finds a place. `residual_first`: the operands of additions are exchanged.
Graph block(bool bias, bool residual_first, bool states) {
  Graph graph;
  const auto linear = [&](ValueId x, const char* name, int64_t in, int64_t out, bool with_bias = false) {
    const ValueId weight = graph.add_parameter(fmt::format("{}.weight", name), TensorType(DType::f32, {out, in}));
    const ValueId b =
        with_bias ? graph.add_parameter(fmt::format("{}.bias", name), TensorType(DType::f32, {out})) : kNoValue;
    return graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{with_bias, DType::f32}), {x, weight, b});
  };
  const auto norm = [&](ValueId x, const char* name) {
    return graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{}),
                      {x, graph.add_parameter(name, TensorType(DType::f32, {kHidden}))});
  };
  const auto add = [&](ValueId residual, ValueId x) {
    return graph.add1(std::make_shared<ops::Add>(),
                      residual_first ? std::vector{residual, x} : std::vector{x, residual});
  };
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, kHidden}));
  const ValueId z = graph.add_input("z", TensorType(DType::f32, {Symbol::tokens, kHidden}));
  ValueId hidden = add(x, z);  // no linear before it: add_rms_norm
  const ValueId normed = norm(hidden, "norm0");
  if (states) {
    const TensorType kv(DType::f32, {Symbol::tokens, 1, kHeadDim}),
        cache(DType::bf16, {kBlocks, 1, kBlockSize, kHeadDim});
    const ValueId k = graph.add_input("k", kv), v = graph.add_input("v", kv);
    const ValueId table = graph.add_input("table", TensorType(DType::f32, {Symbol::tokens, kHeadDim}));
    const ValueId slots = graph.add_input("slots", TensorType(DType::i64, {Symbol::tokens}));
    const ValueId rotated = graph.add1(
        std::make_shared<ops::Rope>(kernels::RopeAttrs{kernels::RopeStyle::rotate_half, kHeadDim}), {k, table});
    graph.add(std::make_shared<ops::KvAppend>(),
              {rotated, v, slots, graph.add_state("cache_k", cache), graph.add_state("cache_v", cache)});
  }
  hidden = add(hidden, linear(normed, "o_proj", kHidden, kHidden, bias));
  const ValueId mlp_in = norm(hidden, "norm1");
  const ValueId gated = graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{}),
                                   {linear(mlp_in, "gate", kHidden, kFfn), linear(mlp_in, "up", kHidden, kFfn)});
  hidden = add(hidden, linear(gated, "down", kFfn, kHidden));
  graph.mark_output("hidden", hidden);
  const ValueId labels = graph.add_input("labels", TensorType(DType::i32, {Symbol::tokens}));
  graph.mark_output("loss", graph.add1(std::make_shared<ops::CrossEntropy>(),
                                       {linear(norm(hidden, "norm2"), "lm_head", kHidden, kVocab), labels}));
  return graph;
}

// A compiled graph with parameters and states of its own, filled from fixed seeds.
class Compiled {
 public:
  Compiled(Graph graph, const std::shared_ptr<Device>& device, Mode mode, std::vector<std::string> disabled,
           bool seeds_come_first = false)
      : parameters_(std::make_shared<ParameterStore>(device)) {
    Environment environment{.device = device, .mesh = {}, .mode = mode};
    environment.bounds[Symbol::tokens] = kMaxTokens;
    environment.disabled_fusions = std::move(disabled);
    environment.seeds_come_first = seeds_come_first;
    program_ = std::make_unique<Program>(std::move(graph), environment, parameters_);
    program_->require_complete();
    uint64_t seed = 1;
    for (const std::string& name : parameters_->names())
      parameters_->load(name, workloads::random_tensor(DType::f32, parameters_->whole_shape(name), ++seed).view,
                        "test");
    for (const auto& [name, id] : program_->states()) {
      const TensorType& type = program_->graph().value(id).type;
      Tensor state = workloads::random_tensor(type.dtype, type.bind(environment.bounds), ++seed);
      program_->bind_state(name, state.view);
      states_[name] = std::move(state);
    }
  }

  // Runs steps of different sizes, and returns the outputs of each, then the states.
  std::map<std::string, Tensor> run() {
    std::map<std::string, Tensor> results;
    for (const int64_t tokens : {int64_t{7}, int64_t{1}, kMaxTokens, int64_t{0}}) {
      SymbolValues symbols;
      symbols[Symbol::tokens] = tokens;
      for (size_t v = 0; v < program_->graph().values().size(); ++v) {
        const Value& value = program_->graph().values()[v];
        if (value.kind != Value::Kind::input) continue;
        const Tensor host = input(value, tokens);
        program_->set_input(static_cast<ValueId>(v), host.view.data, host.view.size_bytes());
      }
      program_->run(symbols);
      for (const GraphOutput& output : program_->graph().outputs())
        results[fmt::format("{} of {} tokens", output.name, tokens)] = read(output.value);
    }
    for (const auto& [name, state] : states_) results[name] = state;
    return results;
  }

  const Program& program() const { return *program_; }
  std::vector<std::string> applied() const {
    std::vector<std::string> names;
    for (const FusionDecision& decision : program_->fusion_decisions())
      if (decision.applied) names.push_back(decision.fusion);
    return names;
  }

 private:
  static Tensor input(const Value& value, int64_t tokens) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    const Shape shape = value.type.bind(symbols);
    if (is_floating(value.type.dtype)) return workloads::random_tensor(value.type.dtype, shape, value.name.size());
    test::RefTensor numbers = test::zeros(shape);
    for (int64_t i = 0; i < tokens; ++i)
      numbers.data[static_cast<size_t>(i)] =
          static_cast<double>(value.name == "slots" ? (i * 5 + 3) % (kBlocks * kBlockSize)
                              : i % 4 == 2          ? -1
                                                    : i * 7 % kVocab);
    return test::narrow(numbers, value.type.dtype);
  }

  Tensor read(ValueId value) const {
    const TensorView view = program_->view(value);
    Tensor result = Tensor::on_host(view.dtype, view.shape);
    program_->read(value, result.view.data);
    return result;
  }

  std::shared_ptr<ParameterStore> parameters_;
  std::unique_ptr<Program> program_;
  std::map<std::string, Tensor> states_;
};

void expect_same(const std::map<std::string, Tensor>& actual, const std::map<std::string, Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    // The comparison means something: every value is a number, and no tensor but an empty one is all zeros.
    bool nonzero = tensor.view.num_elements() == 0;
    for (const double value : test::widen(tensor.view).data) {
      ASSERT_TRUE(std::isfinite(value)) << name;
      nonzero = nonzero || value != 0;
    }
    EXPECT_TRUE(nonzero) << name;
    EXPECT_TRUE(same_bits(actual.at(name).view, tensor.view)) << name;
  }
}

class FusedPrograms : public testing::TestWithParam<Isa> {
 protected:
  std::shared_ptr<Device> device_ =
      std::make_shared<CpuDevice>(DeviceOptions{.num_threads = 2, .isa = isa_name(GetParam())});
};

using Names = std::vector<std::string>;

TEST_P(FusedPrograms, InferenceHasTheBitsOfTheUnfusedGraph) {
  const Names all = {
      "linear_gated_activation", "rope_kv_append", "linear_cross_entropy", "linear_add", "linear_add", "add_rms_norm"};
  for (const bool bias : {false, true})
    for (const bool residual_first : {false, true}) {
      const Graph graph = block(bias, residual_first, true);
      Compiled plain(graph, device_, Mode::inference, {"all"});
      EXPECT_TRUE(plain.applied().empty());
      const std::map<std::string, Tensor> expected = plain.run();
      Compiled fused(graph, device_, Mode::inference, {});
      EXPECT_EQ(fused.applied(), all);
      expect_same(fused.run(), expected);
    }
}

TEST_P(FusedPrograms, EachFusionCanBeSwitchedOffByItself) {
  const Graph graph = block(false, true, true);
  const std::map<std::string, Tensor> expected = Compiled(graph, device_, Mode::inference, {"all"}).run();
  for (const char* name :
       {"linear_gated_activation", "rope_kv_append", "linear_cross_entropy", "linear_add", "add_rms_norm"}) {
    SCOPED_TRACE(name);
    Compiled program(graph, device_, Mode::inference, {name});
    const Names applied = program.applied();
    EXPECT_EQ(std::count(applied.begin(), applied.end(), name), 0);
    EXPECT_GE(applied.size(), 4u);
    for (const FusionDecision& decision : program.program().fusion_decisions())
      EXPECT_EQ(decision.applied ? "" : "switched off", decision.reason);
    expect_same(program.run(), expected);
  }
}

TEST_P(FusedPrograms, TrainingHasTheLossesAndGradientsOfTheUnfusedGraph) {
  // kMaxTokens rows are one chunk of logits, so that the gradient of the head has the same bits too.
  const Graph graph = block(true, true, false);
  Compiled plain(graph, device_, Mode::training, {"all"});
  Compiled fused(graph, device_, Mode::training, {});
  EXPECT_EQ(fused.applied(), (Names{"linear_cross_entropy", "add_rms_norm", "add_rms_norm", "add_rms_norm"}));
  expect_same(fused.run(), plain.run());
}

TEST_P(FusedPrograms, ALossWhoseGradientIsKnownBeforeItIsMadeWithItsGradients) {
  const auto passes_of_loss = [](const Program& program) {
    std::string passes;
    for (const Node& node : program.graph().nodes())
      if (node.op->name() == "linear_cross_entropy") passes += std::string(kernels::pass_name(node.pass)) + " ";
    return passes;
  };
  const Graph graph = block(true, true, false);
  Compiled apart(graph, device_, Mode::training, {});
  Compiled joint(graph, device_, Mode::training, {}, true);
  EXPECT_EQ(passes_of_loss(apart.program()), "forward backward ");
  EXPECT_EQ(passes_of_loss(joint.program()), "backward ");
  expect_same(joint.run(), apart.run());
  // The parts have no such pass.
  EXPECT_EQ(passes_of_loss(Compiled(graph, device_, Mode::training, {"all"}, true).program()), "");
}

INSTANTIATE_TEST_SUITE_P(Cpu, FusedPrograms, testing::ValuesIn(available_isas()),
                         [](const auto& param_info) { return std::string(isa_name(param_info.param)); });

}  // namespace
}  // namespace eadem::pipeline
