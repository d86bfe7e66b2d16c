// SPDX-License-Identifier: Apache-2.0
//
// Hooks see the values that steps compute. Their patterns match names, or are refused.
#include <gtest/gtest.h>

#include <set>

#include "tests/engine/engine_helpers.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace hooks_test {

using test::refusal;

const InferEngine::Input kStep{.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}};

TEST(Hooks, FireWithTheValuesThatStepsMake) {
  const auto engine = make_engine();
  std::vector<int> layers;
  Shape shape;
  engine->hooks().register_hook("model.layers.*", [&](const std::string& name, const TensorView& tensor, int layer) {
    if (name.find("down_proj") != std::string::npos || name.ends_with(".add.y")) {
      layers.push_back(layer);
      shape = tensor.shape;
    }
  });
  ASSERT_TRUE(engine->hooks().has_hooks());
  engine->forward({.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}});
  ASSERT_FALSE(layers.empty());
  EXPECT_EQ(layers.front(), 0);
  EXPECT_EQ(layers.back(), engine->model().info().layers - 1);
  EXPECT_EQ(shape, (Shape{3, engine->model().info().hidden}));
  engine->hooks().clear();
  layers.clear();
  engine->forward({.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}});
  EXPECT_TRUE(layers.empty());
}

TEST(Hooks, PatternsMatchAnywhereInANameAndOneHookIsRemovedAlone) {
  EngineSetup setup;
  setup.options.disabled_fusions = {"all"};
  const auto engine = make_engine(setup);
  std::set<std::string> seen;
  int norms = 0;
  const auto id =
      engine->hooks().register_hook("model.layers.*.[qkv]_proj.reshape.y",
                                    [&](const std::string& name, const TensorView&, int) { seen.insert(name); });
  engine->hooks().register_hook("model.norm.*", [&](const std::string&, const TensorView&, int) { ++norms; });
  engine->forward(kStep);
  std::set<std::string> expected;  // q, k and v have names of their own
  for (int layer = 0; layer < engine->model().info().layers; ++layer)
    for (const char* part : {"q", "k", "v"})
      expected.insert(fmt::format("model.layers.{}.self_attn.{}_proj.reshape.y", layer, part));
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(norms, 1);
  EXPECT_TRUE(engine->hooks().remove(id));
  EXPECT_FALSE(engine->hooks().remove(id));
  seen.clear();
  engine->reset_cache();
  engine->forward(kStep);
  EXPECT_TRUE(seen.empty());
  EXPECT_EQ(norms, 2);
}

TEST(Hooks, NoTwoValuesHaveOneName) {
  for (const bool fused : {true, false}) {
    EngineSetup setup;
    if (!fused) setup.options.disabled_fusions = {"all"};
    const auto engine = make_engine(setup);
    std::multiset<std::string> seen;
    engine->hooks().register_hook("*", [&](const std::string& name, const TensorView&, int) { seen.insert(name); });
    engine->forward(kStep);
    EXPECT_GT(seen.size(), 20u);
    for (const std::string& name : seen) EXPECT_EQ(seen.count(name), 1u) << name;
  }
}

TEST(Hooks, ANameThatNothingHasIsRefusedWithTheNearestOnes) {
  const auto engine = make_engine();
  const auto nothing = [](const std::string&, const TensorView&, int) {};
  const std::string text = refusal([&] { engine->hooks().register_hook("model.norm.rms_nrom.y", nothing); });
  EXPECT_HAS(text, "NotFound: hook on 'model.norm.rms_nrom.y': no value has that name");
  EXPECT_HAS(text, "'model.norm.");
  EXPECT_HAS(refusal([&] { engine->hooks().register_hook("model.layer.*", nothing); }),
             "the nearest names are 'model.");
  EXPECT_HAS(refusal([&] { engine->hooks().register_hook("model.nrom*", nothing); }),
             "the nearest names are 'model.norm.");
  EXPECT_HAS(refusal([&] { engine->hooks().register_linear_input_hook("lm_haed.weight", nothing); }),
             "'lm_head.weight'");
  EXPECT_FALSE(engine->hooks().has_hooks());
  // A value that a fusion keeps inside a kernel.
  EngineSetup setup;
  setup.options.disabled_fusions = {"all"};
  const auto whole = make_engine(setup);
  int refused = 0;
  for (const std::string& name : whole->hooks().names().values) {
    const std::string answer = refusal([&] { engine->hooks().register_hook(name, nothing); });
    if (answer.empty()) continue;
    EXPECT_HAS(answer, "a fusion keeps that value inside its kernel (");
    EXPECT_HAS(answer, "the nearest values that are seen are '");
    ++refused;
  }
  EXPECT_GT(refused, 0);
}

TEST(Hooks, AFusionIsSwitchedOffOnRequestWithTheSameBits) {
  EngineSetup setup;
  setup.options.mode = HardwareMode::accuracy;  // rounding comes after fusions, and names of its own with it
  const auto engine = make_engine(setup);
  const InferEngine::Input step{.input_ids = {1, 2, 3}, .input_lengths = {3}, .cache_lengths = {0}, .all_logits = true};
  engine->forward(step);
  const std::vector<float> expected = values(engine->logits());
  const std::map<std::string, std::string> fused = engine->hooks().names().fused;
  std::set<std::string> fusions;
  for (const auto& [name, fusion] : fused) fusions.insert(fusion);
  EXPECT_GE(fusions.size(), 2u);
  for (const std::string& fusion : fusions) {
    const auto found =
        std::find_if(fused.begin(), fused.end(), [&](const auto& each) { return each.second == fusion; });
    SCOPED_TRACE(fmt::format("'{}' in {}", found->first, fusion));
    int fired = 0;
    const auto count = [&](const std::string&, const TensorView&, int) { ++fired; };
    engine->unfuse(found->first);
    engine->hooks().register_hook(found->first, count);
    engine->forward(step);
    EXPECT_EQ(fired, 1);
    expect_same_bits(values(engine->logits()), expected, "logits");
    engine->hooks().clear();
  }
  engine->unfuse("no.such.value");  // changes nothing
  engine->forward(step);
  expect_same_bits(values(engine->logits()), expected, "logits");
}

}  // namespace hooks_test
}  // namespace eadem::engine
