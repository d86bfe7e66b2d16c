// SPDX-License-Identifier: Apache-2.0
//
// Frozen parameters keep their bits and have neither gradients nor optimizer states; the others train as if nothing
// were frozen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "eadem/io/files/atomic_file.h"
#include "eadem/train/checkpoint.h"
#include "eadem/train/recipe.h"
#include "eadem/train/trainer.h"
#include "tests/support/refusal.h"

namespace eadem::train {
namespace {

namespace fs = std::filesystem;
using test::refusal;

class Frozen : public testing::Test {
 public:
  static std::unique_ptr<Trainer> trainer(std::vector<std::string> frozen, DType weights = DType::f32) {
    const fs::path model = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/qwen3";
    const models::Checkpoint checkpoint = models::open_checkpoint(model.string());
    TrainerOptions options;
    options.weights = weights;
    options.batch_tokens = 64;
    options.max_grad_norm = 0;  // so that gradients do not scale each other
    options.frozen = std::move(frozen);
    auto result = std::make_unique<Trainer>(checkpoint.model, open_device("cpu", {.num_threads = 1}), options);
    result->load(checkpoint);
    return result;
  }

  static Batch batch() {
    Batch result;
    for (int32_t t = 0; t < 16; ++t) {
      result.token_ids.push_back(3 + 7 * t % 90);
      result.positions.push_back(t);
      result.labels.push_back(3 + 7 * (t + 1) % 90);
    }
    result.query_start = {0, 16};
    result.lengths = {16};
    result.num_labels = 16;
    return result;
  }

  static std::map<std::string, Tensor> state(const Trainer& trainer) {
    const auto list = trainer.state_dict();
    return {list.begin(), list.end()};
  }

  static bool same(const Tensor& a, const Tensor& b) {
    return std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())) == 0;
  }
};

TEST_F(Frozen, HaveNoGradientNoStateAndKeepTheirBits) {
  const std::string frozen_name = "model.layers.0.mlp.up_proj.weight";
  for (const DType weights : {DType::f32, DType::bf16}) {
    const auto all = trainer({}, weights), some = trainer({"model.embed_tokens.*", "model.layers.0.*"}, weights);
    const std::map<std::string, Tensor> before = state(*some);
    const Batch data = batch();
    all->step({&data, 1}, 1e-2);
    some->step({&data, 1}, 1e-2);
    const std::map<std::string, Tensor> after = state(*some), free = state(*all);
    size_t trained = 0;
    for (const std::string& name : some->parameter_names()) {
      const bool is_frozen = name.starts_with("model.embed_tokens.") || name.starts_with("model.layers.0.");
      EXPECT_EQ(same(before.at(name), after.at(name)), is_frozen) << name;
      trained += !is_frozen;
      if (is_frozen) continue;
      // Every gradient is that of the model in which all train.
      EXPECT_TRUE(same(some->gradient(name), all->gradient(name))) << name;
      EXPECT_TRUE(same(after.at(name), free.at(name))) << name;
    }
    EXPECT_EQ(some->trained_names().size(), trained);
    EXPECT_HAS(refusal([&] { some->gradient(frozen_name); }),
               "NotFound: no parameter '" + frozen_name + "' is trained");
    const size_t states = weights == DType::bf16 ? 3 : 2;
    size_t masters = 0;
    for (const auto& [name, tensor] : some->optimizer_state()) {
      EXPECT_EQ(name.find("layers.0."), std::string::npos) << name;
      EXPECT_EQ(name.find("embed_tokens"), std::string::npos) << name;
      masters += name.starts_with("master.");
    }
    // Norms are f32 in either case and have no master.
    EXPECT_EQ(some->optimizer_state().size(), 2 * trained + masters);
    EXPECT_EQ(masters > 0, states == 3);
    // Nothing below the lowest trained layer has a backward pass.
    for (const pipeline::Node& node : some->training_program().graph().nodes())
      EXPECT_FALSE(node.pass == pipeline::Pass::backward && node.layer == 0) << describe(node);
  }
}

TEST_F(Frozen, PatternsThatFitNothingAreRefused) {
  EXPECT_HAS(refusal([] { trainer({"model.layers.9.*"}); }),
             "InvalidArgument: no parameter matches the frozen 'model.layers.9.*'; there are '");
  EXPECT_HAS(refusal([] { trainer({"*"}); }), "parameters are frozen: nothing is trained");
}

TEST_F(Frozen, ARecipeNamesThem) {
  std::string pattern = (fs::temp_directory_path() / "eadem_frozen_XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const std::string path = pattern + "/r.toml";
  const auto with = [&](const std::string& freeze) {
    io::write_file_atomically(path, "[model]\ninit_from = \"x\"\n[data]\ntrain = [\"t.txt\"]\n[training]\nsteps = 4\n" +
                                        freeze + "\n[output]\ndirectory = \"out\"\n");
    return load_recipe(path);
  };
  EXPECT_TRUE(with("").training.freeze.empty());
  EXPECT_EQ(with("freeze = [\"lm_head.*\", \"model.norm.weight\"]").training.freeze,
            (std::vector<std::string>{"lm_head.*", "model.norm.weight"}));
  EXPECT_HAS(refusal([&] { with("freeze = \"lm_head.*\""); }), "'training.freeze' is 'lm_head.*'; expected an array");
  fs::remove_all(pattern);
}

// Checkpoints hold w of norms that multiply by 1 + w. A resumed run has the sum to the bit nevertheless.
TEST(Resume, SumsOfNormsKeepTheirBits) {
  std::string pattern = (fs::temp_directory_path() / "eadem_sums_XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const models::Checkpoint model =
      models::open_checkpoint((fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/gemma3").string());
  const auto trainer = [&] {
    return std::make_unique<Trainer>(model.model, open_device("cpu", {.num_threads = 1}),
                                     TrainerOptions{.batch_tokens = 64});
  };
  const auto whole = trainer(), resumed = trainer();
  whole->load(model);
  // Sums this small have bits that are lost in w.
  Tensor small = Tensor::on_host(DType::f32, Shape{24});
  std::fill_n(small.view.as<float>(), 24, 0.1f);
  whole->load_param("model.norm.weight", small.view);
  const Batch data = Frozen::batch();
  whole->step({&data, 1}, 1e-3);
  write_checkpoint(*whole, {.step = whole->num_steps()}, {}, pattern + "/c");
  load_checkpoint(*resumed, pattern + "/c", verify_checkpoint(pattern + "/c"));
  const auto a = whole->state_dict(), b = resumed->state_dict();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(Frozen::same(a[i].second, b[i].second)) << a[i].first;
  EXPECT_EQ(whole->step({&data, 1}, 1e-3).loss, resumed->step({&data, 1}, 1e-3).loss);
  fs::remove_all(pattern);
}

}  // namespace
}  // namespace eadem::train
