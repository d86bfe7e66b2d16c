// SPDX-License-Identifier: Apache-2.0
//
// The memory plan on real graphs, checked by brute force: no two values that live at the same time share bytes, unless
// one was meant to be written over the other.
#include <gtest/gtest.h>

#include "eadem/models/auto_model.h"
#include "eadem/models/graphs.h"
#include "eadem/pipeline/program.h"

namespace eadem::pipeline {
namespace {

std::unique_ptr<Program> compile(const char* name, Mode mode, bool op_by_op) {
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto model =
      models::model_from_config(std::string(EADEM_SOURCE_DIR "/tests/data/golden/") + name + "/config.json");
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(model->spec(), *device, HardwareMode::accuracy);
  models::GraphOptions options{.device = device.get(), .hardware = &hardware};
  if (mode == Mode::inference) options.cache = {modules::CacheLayout::paged, 8, 4};
  models::BuiltGraph built = mode == Mode::inference ? models::build_inference_graph(*model, options)
                                                     : models::build_training_graph(*model, options);
  Environment environment{.device = device, .mode = mode};
  environment.bounds[Symbol::tokens] = 12;
  environment.bounds[Symbol::sequences] = 3;
  environment.bounds[Symbol::logit_rows] = 3;
  environment.bounds[Symbol::max_blocks] = 8;
  environment.op_by_op = op_by_op;
  return std::make_unique<Program>(std::move(built.graph), environment, std::make_shared<ParameterStore>(device));
}

struct Life {
  int first = 1 << 30, last = -1;
};

void check_plan(const Program& program) {
  const Graph& graph = program.graph();
  const MemoryPlan& plan = program.memory_plan();
  const SymbolValues& bounds = program.environment().bounds;
  const int end = static_cast<int>(graph.nodes().size());
  std::vector<Life> lives(graph.values().size());
  const auto touch = [&](ValueId id, int node) {
    if (id == kNoValue) return;
    Life& life = lives[static_cast<size_t>(plan.root[static_cast<size_t>(id)])];
    life.first = std::min(life.first, node);
    life.last = std::max(life.last, node);
  };
  for (int n = 0; n < end; ++n) {
    for (ValueId id : graph.nodes()[static_cast<size_t>(n)].inputs) touch(id, n);
    for (ValueId id : graph.nodes()[static_cast<size_t>(n)].outputs) touch(id, n);
  }
  for (const GraphOutput& output : graph.outputs()) touch(output.value, end);
  for (size_t a = 0; a < graph.values().size(); ++a) {
    if (plan.offset[a] < 0) continue;
    const int64_t a_end = plan.offset[a] + graph.values()[a].type.size_bytes(bounds);
    EXPECT_LE(a_end, plan.arena_bytes);
    EXPECT_EQ(plan.offset[a] % MemoryPlan::kAlignment, 0);
    for (size_t b = a + 1; b < graph.values().size(); ++b) {
      if (plan.offset[b] < 0 || lives[a].last < 0 || lives[b].last < 0) continue;
      const bool together = lives[a].first <= lives[b].last && lives[b].first <= lives[a].last;
      const int64_t b_end = plan.offset[b] + graph.values()[b].type.size_bytes(bounds);
      const bool overlap = plan.offset[a] < b_end && plan.offset[b] < a_end;
      EXPECT_FALSE(together && overlap) << graph.values()[a].name << " and " << graph.values()[b].name;
    }
  }
}

TEST(MemoryPlan, ValuesThatLiveTogetherLieApart) {
  for (const char* name : {"llama", "qwen3"})
    for (Mode mode : {Mode::inference, Mode::training})
      for (bool op_by_op : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name, static_cast<int>(mode), op_by_op));
        check_plan(*compile(name, mode, op_by_op));
      }
}

TEST(MemoryPlan, ReusesBytes) {
  const auto program = compile("llama", Mode::inference, false);
  EXPECT_LT(program->memory_plan().arena_bytes, program->memory_plan().bytes_without_reuse / 2);
}

// An op that changes a state in place, and says so only with `alias` 1.
class Count final : public ops::Op {
 public:
  explicit Count(int alias) : alias_(alias) {}
  std::string_view name() const override { return "count"; }
  std::vector<ops::Port> inputs() const override { return {{"x"}, {"seen", ops::Port::Role::state}}; }
  std::vector<ops::Port> outputs() const override { return {{"y"}, {"seen", ops::Port::Role::state}}; }
  kernels::AttrsRef attrs() const override {
    static constexpr kernels::NoAttrs kNone;
    return kernels::AttrsRef(kNone);
  }
  std::vector<TensorType> infer_types(std::span<const TensorType> in) const override { return {in[0], in[1]}; }
  int inference_alias(int output) const override { return output == 1 ? alias_ : -1; }
  ops::Cost cost(ops::Pass, std::span<const TensorType>, std::span<const TensorType>,
                 const SymbolValues&) const override {
    return {};
  }
  void reference(ops::Pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const override {
    out[0].data = in[0].data;
    out[1].data[0] = in[1].data[0] + 1;
  }

 private:
  int alias_;
};

std::unique_ptr<Program> compile_count(int alias) {
  Graph graph;
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {4}));
  const ValueId seen = graph.add_state("seen", TensorType(DType::f32, {1}));
  graph.mark_output("y", graph.add(std::make_shared<Count>(alias), {x, seen})[0]);
  const auto device = open_device("reference");
  Environment environment{.device = device, .mode = Mode::inference};
  return std::make_unique<Program>(std::move(graph), environment, std::make_shared<ParameterStore>(device));
}

TEST(MemoryPlan, AStateThatIsNotWrittenInPlaceIsRefused) {
  EXPECT_NO_THROW(compile_count(1));
  try {
    compile_count(-1);
    FAIL() << "compiled";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("output 'seen' is a state"), std::string::npos) << error.what();
  }
}

TEST(MemoryPlan, KeepsEverythingWhenAsked) {
  const auto program = compile("llama", Mode::inference, true);
  // In place happens only for views and states.
  const Graph& graph = program->graph();
  for (const Node& node : graph.nodes())
    for (ValueId id : node.outputs) {
      if (id == kNoValue) continue;
      const ValueId root = program->memory_plan().root[static_cast<size_t>(id)];
      EXPECT_TRUE(root == id || node.op->is_view() || graph.value(root).kind == Value::Kind::state)
          << graph.value(id).name;
    }
}

}  // namespace
}  // namespace eadem::pipeline
