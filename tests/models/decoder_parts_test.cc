// SPDX-License-Identifier: Apache-2.0
//
// A decoder in parts: the stages of a pipeline, embeddings from outside and an early exit compute the bits of the
// whole.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "eadem/models/parameter_reader.h"
#include "eadem/pipeline/program.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;
using pipeline::Program;

constexpr int64_t kTokens = 12;

class DecoderParts : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    checkpoint_ = open_checkpoint((fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / GetParam()).string());
    device_ = open_device("cpu", {.num_threads = 1});
    HardwareOverrides overrides;
    overrides.weights = DType::f32;
    hardware_ = modules::AutoHardwareConfig::from_model_spec(checkpoint_.model->spec(), *device_,
                                                             HardwareMode::accuracy, overrides, "the test");
  }

  // A program of what `build` adds; "x" is its output. Its parameters come from the checkpoint.
  struct Part {
    std::shared_ptr<pipeline::ParameterStore> parameters;
    std::unique_ptr<Program> program;
  };
  template <typename Build>
  Part part(Build&& build) const {
    pipeline::Graph graph;
    BuildContext context{.graph = graph, .device = *device_, .hardware = hardware_, .cache = {}};
    const auto input = [&](const char* name, std::initializer_list<Dim> dims) {
      return graph.add_input(name, TensorType(DType::i32, dims));
    };
    context.step.token_ids = input("token_ids", {Symbol::tokens});
    context.step.positions = input("positions", {Symbol::tokens});
    context.step.query_start = input("query_start", {Dim(Symbol::sequences, 1)});
    context.step.kv_length = input("kv_length", {Symbol::sequences});
    graph.mark_output("x", build(context));
    Part result{std::make_shared<pipeline::ParameterStore>(device_), nullptr};
    pipeline::Environment environment{.device = device_};
    environment.bounds[Symbol::tokens] = kTokens;
    environment.bounds[Symbol::sequences] = 1;
    result.program = std::make_unique<Program>(std::move(graph), environment, result.parameters);
    result.program->require_complete();
    for (const std::string& name : result.parameters->names())
      result.parameters->load(name, reader_->read(name).view, "the test");
    return result;
  }

  std::vector<float> run(const Part& part, const std::vector<float>& hidden = {}) const {
    std::vector<int32_t> ids, positions;
    for (int32_t t = 0; t < kTokens; ++t) {
      ids.push_back(3 + 7 * t % 90);
      positions.push_back(t);
    }
    const std::vector<int32_t> start = {0, kTokens}, length = {kTokens};
    Program& program = *part.program;
    const auto set = [&](const char* name, const auto& values) {
      program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
    };
    set("token_ids", ids);
    set("positions", positions);
    set("query_start", start);
    set("kv_length", length);
    if (!hidden.empty()) set("hidden", hidden);
    SymbolValues symbols;
    symbols[Symbol::tokens] = kTokens;
    symbols[Symbol::sequences] = 1;
    program.run(symbols);
    const pipeline::ValueId x = program.output("x");
    std::vector<float> result(static_cast<size_t>(program.view(x).num_elements()));
    program.read(x, result.data());
    return result;
  }

  ValueId hidden_input(BuildContext& context) const {
    return context.graph.add_input("hidden",
                                   TensorType(DType::f32, {Symbol::tokens, checkpoint_.model->info().hidden}));
  }

  Checkpoint checkpoint_;
  std::shared_ptr<Device> device_;
  modules::AutoHardwareConfig hardware_;
  std::unique_ptr<ParameterReader> reader_;
};

TEST_P(DecoderParts, ComputeTheBitsOfTheWhole) {
  reader_ = std::make_unique<ParameterReader>(checkpoint_);
  const Model& model = *checkpoint_.model;
  const auto last = static_cast<int>(model.info().layers) - 1;
  const Part whole = part([&](BuildContext& c) { return model.head(c, model.build_decoder(c)); });
  const Part first = part([&](BuildContext& c) { return model.layer(c, 0, model.embed(c)); });
  const Part rest = part([&](BuildContext& c) {
    ValueId x = hidden_input(c);
    for (int layer = 1; layer <= last; ++layer) x = model.layer(c, layer, x);
    return model.head(c, model.finish(c, x));
  });
  EXPECT_EQ(run(rest, run(first)), run(whole));
  EXPECT_FALSE(first.parameters->contains("model.norm.weight"));
  EXPECT_FALSE(rest.parameters->contains("model.layers.0.mlp.up_proj.weight"));
  // Embeddings from outside, and a pass that leaves after the first layer.
  const Part embedding = part([&](BuildContext& c) { return model.embed(c); });
  const Part from_outside = part([&](BuildContext& c) { return model.layer(c, 0, hidden_input(c)); });
  EXPECT_EQ(run(from_outside, run(embedding)), run(first));
  const Part early = part([&](BuildContext& c) { return model.finish(c, model.layer(c, 0, model.embed(c))); });
  const Part exit = part([&](BuildContext& c) { return model.finish(c, hidden_input(c)); });
  EXPECT_EQ(run(early), run(exit, run(first)));
}

INSTANTIATE_TEST_SUITE_P(Models, DecoderParts,
                         testing::Values("llama", "qwen3", "gemma3", "gemma4_equal", "qwen3_moe", "deepseek_v2"));

}  // namespace
}  // namespace eadem::models
