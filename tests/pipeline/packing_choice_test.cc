// SPDX-License-Identifier: Apache-2.0
//
// Programs that read the same parameters agree on one layout of each, so that a model is kept once.
#include "eadem/pipeline/passes/packing_choice.h"

#include <gtest/gtest.h>

#include "eadem/engine/infer_engine.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/pipeline/program.h"

namespace eadem::pipeline {
namespace {

using kernels::Kernel;
using kernels::KernelRequest;
using kernels::cpu::PackedPanels;

const Encoding* forward_panels() { return PackedPanels::of(DType::f32, PackedPanels::Side::normal); }
const Encoding* transposed_panels() { return PackedPanels::of(DType::f32, PackedPanels::Side::transposed); }

constexpr int64_t kFewTokens = 8;
bool has_few_tokens(const KernelRequest& r) { return r.bounds[Symbol::tokens] <= kFewTokens; }

kernels::PlanPtr prepare_idle(const KernelRequest&, Context&) {
  return kernels::make_plan([](const kernels::KernelCall&) {});
}

// Few tokens prefer one packing, many the other; together they prefer the second.
constexpr Kernel kForFew{"for_few", kernels::Pass::inference,
                         [](const KernelRequest& r) { return Verdict::yes(has_few_tokens(r) ? 1 : 100); }, prepare_idle,
                         [](const KernelRequest&, int input) { return input == 1 ? forward_panels() : nullptr; }};
constexpr Kernel kForMany{"for_many", kernels::Pass::inference,
                          [](const KernelRequest& r) { return Verdict::yes(has_few_tokens(r) ? 5 : 10); }, prepare_idle,
                          [](const KernelRequest&, int input) { return input == 1 ? transposed_panels() : nullptr; }};

// An op that reads a parameter. `lists`: whether it has both kernels, or the first alone.
class Reader final : public ops::Op {
 public:
  explicit Reader(bool has_both) : has_both_(has_both) {}
  std::string_view name() const override { return "reader"; }
  std::vector<ops::Port> inputs() const override { return {{"x"}, {"w", ops::Port::Role::parameter}}; }
  std::vector<ops::Port> outputs() const override { return {{"y"}}; }
  kernels::AttrsRef attrs() const override { return kernels::AttrsRef(attrs_); }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override { return {inputs[0]}; }
  ops::Cost cost(ops::Pass, std::span<const TensorType>, std::span<const TensorType>,
                 const SymbolValues&) const override {
    return {};
  }
  void reference(ops::Pass, std::span<const ops::RefTensor>, std::span<ops::RefTensor>) const override {}
  kernels::KernelList kernels(const kernels::Backend& /*backend*/) const override {
    return has_both_ ? kernels::KernelList{&kForFew, &kForMany} : kernels::KernelList{&kForFew};
  }

 private:
  bool has_both_;
  kernels::NoAttrs attrs_;
};

class PackingChoice : public testing::Test {
 protected:
  Program::Source source(int64_t tokens, bool has_both = true) const {
    Graph graph;
    const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, 32}));
    const ValueId w = graph.add_parameter("w", TensorType(DType::f32, {32, 32}));
    graph.mark_output("y", graph.add1(std::make_shared<Reader>(has_both), {x, w}));
    Environment environment{.device = device_};
    environment.bounds[Symbol::tokens] = tokens;
    return {std::move(graph), std::move(environment)};
  }
  std::unique_ptr<Program> compile_alone(int64_t tokens) {
    Program::Source alone = source(tokens);
    return std::make_unique<Program>(std::move(alone.graph), std::move(alone.environment), parameters_);
  }
  static std::string_view chosen(const Program& program) { return program.choices()[0].kernel->name; }

  static constexpr int64_t kOneCopy = 32 * 32 * 4;
  std::shared_ptr<Device> device_ = open_device("cpu", {.num_threads = 1});
  std::shared_ptr<ParameterStore> parameters_ = std::make_shared<ParameterStore>(device_);
};

TEST_F(PackingChoice, AProgramAloneTakesItsCheapest) {
  EXPECT_EQ(chosen(*compile_alone(kFewTokens)), "for_few");
  parameters_ = std::make_shared<ParameterStore>(device_);
  EXPECT_EQ(chosen(*compile_alone(100)), "for_many");
}

TEST_F(PackingChoice, TogetherTheyKeepTheFormThatIsCheapestForAll) {
  for (const bool few_first : {true, false}) {
    parameters_ = std::make_shared<ParameterStore>(device_);
    std::vector<Program::Source> sources;
    sources.push_back(source(few_first ? kFewTokens : 100));
    sources.push_back(source(few_first ? 100 : kFewTokens));
    const auto programs = Program::compile(std::move(sources), parameters_);
    for (const auto& program : programs) EXPECT_EQ(chosen(*program), "for_many");
    EXPECT_EQ(parameters_->size_bytes(), kOneCopy);
    const Decision& decision = programs[few_first ? 0 : 1]->choices()[0].decision;
    EXPECT_NE(to_string(decision).find("reads 'w' as packed_panels_f32; it is kept as packed_panels_f32_transposed"),
              std::string::npos)
        << to_string(decision);
  }
}

TEST_F(PackingChoice, ALaterProgramTakesTheFormThatIsThere) {
  const auto first = compile_alone(kFewTokens), second = compile_alone(100);
  EXPECT_EQ(chosen(*first), "for_few");
  EXPECT_EQ(chosen(*second), "for_few");
  EXPECT_EQ(parameters_->size_bytes(), kOneCopy);
}

TEST_F(PackingChoice, WhatNoFormServesIsKeptTwice) {
  const auto first = compile_alone(100);
  EXPECT_EQ(chosen(*first), "for_many");
  Program::Source only_few = source(kFewTokens, false);
  const Program second(std::move(only_few.graph), std::move(only_few.environment), parameters_);
  EXPECT_EQ(chosen(second), "for_few");
  EXPECT_EQ(parameters_->size_bytes(), 2 * kOneCopy);
}

// The embedding gathers rows of a plain table; the LM head, to which it is tied, reads panels. Two programs read both.
TEST(PackingChoiceOfModels, EveryParameterIsKeptOnce) {
  for (const char* path : {"/assets/stories", "/tests/data/golden/qwen3"}) {
    const auto engine = engine::InferEngine::from_checkpoint(
        models::open_checkpoint(std::string(EADEM_SOURCE_DIR) + path), open_device("cpu", {.num_threads = 1}), {});
    const std::vector<ParameterStore::LayoutOf> layouts = engine->parameters().layouts();
    for (size_t i = 1; i < layouts.size(); ++i) EXPECT_NE(layouts[i].name, layouts[i - 1].name) << path;
  }
}

}  // namespace
}  // namespace eadem::pipeline
