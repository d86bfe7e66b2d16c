// SPDX-License-Identifier: Apache-2.0
//
// Activations are rounded on edges: once for each value and encoding, in ops that a program shows.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/rms_norm.h"
#include "eadem/pipeline/passes/precision.h"
#include "eadem/pipeline/program.h"

namespace eadem::pipeline {
namespace {

constexpr int64_t kWidth = 512, kOutputs = 64;

struct Weight {
  std::string name;
  const Encoding* encoding;
};

class Rounding : public testing::TestWithParam<Isa> {
 protected:
  // Products of one x with each weight.
  Program::Source source(const std::vector<Weight>& weights, int64_t tokens) const {
    Graph graph;
    const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, kWidth}));
    for (const Weight& weight : weights) {
      const Graph::Scope scope(graph, weight.name);
      const ValueId w = graph.add_parameter(weight.name, TensorType(DType::f32, {kOutputs, kWidth}, weight.encoding));
      graph.mark_output(weight.name, graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {x, w}));
    }
    Environment environment{.device = device_};
    environment.bounds[Symbol::tokens] = tokens;
    return {std::move(graph), std::move(environment)};
  }

  std::unique_ptr<Program> compile(const std::vector<Weight>& weights, int64_t tokens) {
    Program::Source made = source(weights, tokens);
    auto program = std::make_unique<Program>(std::move(made.graph), std::move(made.environment), parameters_);
    for (const Weight& weight : weights) load(weight.name, weight.encoding);
    return program;
  }

  // Loads random values, which depend on the name.
  void load(const std::string& name, const Encoding* encoding) {
    const Tensor plain = random_tensor(kOutputs, static_cast<uint32_t>(name[0]));
    if (encoding == nullptr) return parameters_->load(name, plain.view, "test");
    const Tensor encoded = Tensor::in_one_piece(DType::f32, plain.shape(), *encoding);
    encoding->encode(encoded.view, plain.view);
    parameters_->load(name, encoded.view, "test");
  }

  static Tensor random_tensor(int64_t rows, uint32_t seed) {
    const Tensor values = Tensor::on_host(DType::f32, Shape{rows, kWidth});
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < rows * kWidth; ++i) values.view.as<float>()[i] = uniform(random);
    return values;
  }

  // The output `name` after a step of `tokens` rows of x.
  static std::vector<float> run(Program& program, const std::string& name, int64_t tokens) {
    const Tensor x = random_tensor(tokens, 3);
    program.set_input(program.input("x"), x.view.data, x.view.size_bytes());
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    program.run(symbols);
    std::vector<float> y(static_cast<size_t>(tokens * kOutputs));
    program.read(program.output(name), y.data());
    return y;
  }

  std::shared_ptr<Device> device_ = open_device("cpu", {.num_threads = 2, .isa = isa_name(GetParam())});
  std::shared_ptr<ParameterStore> parameters_ = std::make_shared<ParameterStore>(device_);
  const Encoding* q4_k_ = BlockEncoding::find("q4_k");
  const Encoding* q6_k_ = BlockEncoding::find("q6_k");
  const Encoding* q8_0_ = BlockEncoding::find("q8_0");
};

std::vector<std::string_view> op_names(const Program& program) {
  std::vector<std::string_view> names;
  for (const Node& node : program.graph().nodes()) names.push_back(node.op->name());
  return names;
}

TEST_P(Rounding, AValueIsRoundedOnceForAllItsReaders) {
  const auto program = compile({{"q", q4_k_}, {"k", q8_0_}, {"v", q6_k_}, {"plain", nullptr}}, 5);
  EXPECT_EQ(op_names(*program), (std::vector<std::string_view>{"quantize", "linear", "linear", "linear", "linear"}));
  const Graph& graph = program->graph();
  for (size_t n : {1, 2, 3}) EXPECT_EQ(graph.nodes()[n].inputs[0], graph.nodes()[0].outputs[0]);
  EXPECT_EQ(graph.nodes()[4].inputs[0], graph.nodes()[0].inputs[0]);
  EXPECT_EQ(program->choices()[1].inputs[0].encoding->name(), "int8_rows");

  // A row of 512 values: as many codes, and for each of 16 steps a scale and two sums. Each product for itself: thrice.
  SymbolValues symbols;
  symbols[Symbol::tokens] = 5;
  const RoundingCount count = count_rounding(graph, symbols);
  EXPECT_EQ(count.values, 1);
  EXPECT_EQ(count.readers, 3);
  EXPECT_EQ(count.bytes, 5 * (512 + 16 * 12));
  EXPECT_EQ(count.bytes_if_alone, 3 * count.bytes);
}

TEST_P(Rounding, SharedRowsHaveTheBitsOfRowsOfTheirOwn) {
  const std::vector<Weight> all = {{"q", q4_k_}, {"k", q8_0_}, {"v", q6_k_}, {"plain", nullptr}};
  const auto together = compile(all, 70);
  for (const Weight& weight : all) {
    const auto alone = compile({weight}, 33);
    for (int64_t tokens : {1, 2, 16, 33}) {  // fewer rows than the planes have room for
      const std::vector<float> a = run(*together, weight.name, tokens), b = run(*alone, weight.name, tokens);
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << weight.name << ", " << tokens;
    }
  }
}

TEST_P(Rounding, OpByOpHasTheSameBits) {
  const auto program = compile({{"q", q4_k_}, {"v", q6_k_}}, 9);
  Program::Source made = source({{"q", q4_k_}, {"v", q6_k_}}, 9);
  made.environment.op_by_op = true;
  Program op_by_op(std::move(made.graph), std::move(made.environment), parameters_);
  for (const std::string name : {"q", "v"}) EXPECT_EQ(run(*program, name, 9), run(op_by_op, name, 9));
}

// A norm that only rounding reads writes rounded rows; one that others read, too, does not. The bits are the same.
TEST_P(Rounding, NormsWriteRoundedRows) {
  for (const bool adds : {false, true})
    for (const bool others : {false, true}) {
      std::vector<std::vector<float>> results;
      for (const bool fused : {true, false}) {
        Graph graph;
        const TensorType type(DType::f32, {Symbol::tokens, kWidth});
        ValueId x = graph.add_input("x", type);
        if (adds) x = graph.add1(std::make_shared<ops::Add>(), {x, graph.add_input("z", type)});
        const ValueId scale = graph.add_parameter("norm", TensorType(DType::f32, {kWidth}));
        const ValueId normed = graph.add1(std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{}), {x, scale});
        const ValueId w = graph.add_parameter("q", TensorType(DType::f32, {kOutputs, kWidth}, q4_k_));
        const ValueId v = graph.add_parameter("v", TensorType(DType::f32, {kOutputs, kWidth}, q6_k_));
        graph.mark_output("q", graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {normed, w}));
        graph.mark_output("v", graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {normed, v}));
        if (others) graph.mark_output("normed", normed);
        Environment environment{.device = device_};
        environment.bounds[Symbol::tokens] = 33;
        if (!fused) environment.disabled_fusions = {"all"};
        Program program(std::move(graph), std::move(environment), parameters_);
        load("q", q4_k_);
        load("v", q6_k_);
        const Tensor ones = random_tensor(1, 9), z = random_tensor(33, 8);
        parameters_->load("norm", ones.view.reshaped(Shape{kWidth}), "test");
        if (adds) program.set_input(program.input("z"), z.view.data, z.view.size_bytes());
        using Names = std::vector<std::string_view>;
        Names expected = {adds ? "add_rms_norm_quantize" : "rms_norm_quantize", "linear", "linear"};
        if (others) expected = {adds ? "add_rms_norm" : "rms_norm", "quantize", "linear", "linear"};
        if (fused) {
          EXPECT_EQ(op_names(program), expected);
        }
        for (int64_t tokens : {1, 7, 33})
          for (const char* name : {"q", "v"}) {
            std::vector<float> y = run(program, name, tokens);
            results.push_back(std::move(y));
          }
      }
      for (size_t i = 0; i < results.size() / 2; ++i)
        EXPECT_EQ(std::memcmp(results[i].data(), results[i + 6].data(), results[i].size() * sizeof(float)), 0) << i;
    }
}

// In a training program each pass rounds from the value as it was computed.
TEST_P(Rounding, TheForwardHalfGrowsByWhatItRounds) {
  if (!has_bf16_products(GetParam())) GTEST_SKIP() << "trainable weights are multiplied as they are";
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, kWidth}));
  const ValueId w = graph.add_parameter("w", TensorType(DType::bf16, {kOutputs, kWidth}));
  graph.mark_output("y", graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{}), {x, w}));
  Environment environment{.device = device_, .mode = Mode::training};
  environment.bounds[Symbol::tokens] = 5;
  const Program program(std::move(graph), std::move(environment), parameters_);
  EXPECT_EQ(op_names(program), (std::vector<std::string_view>{"quantize", "linear", "linear"}));
  EXPECT_EQ(program.graph().nodes()[2].inputs[0], program.graph().nodes()[0].inputs[0]);
}

INSTANTIATE_TEST_SUITE_P(Isas, Rounding, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace eadem::pipeline
