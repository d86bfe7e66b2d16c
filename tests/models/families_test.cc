// SPDX-License-Identifier: Apache-2.0
//
// Every family that has a small golden: what a chunked prefill, both formats of checkpoints and a step of
// training must give. Logits and greedy tokens are compared in tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/models/family.h"
#include "eadem/models/graphs.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "eadem/train/trainer.h"
#include "tests/engine/golden_families.h"
#include "tests/support/f32_error.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;
using test::GoldenFamily;

class Families : public testing::TestWithParam<GoldenFamily> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_families_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    golden_ = open_checkpoint(path("").string());
  }
  void TearDown() override { fs::remove_all(folder_); }

  static fs::path path(const char* file) {
    return fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / GetParam().folder / file;
  }

  static std::unique_ptr<engine::InferEngine> engine_of(const Checkpoint& checkpoint) {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.max_logit_rows = options.max_num_batched_tokens = 64;
    return engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 2}), options);
  }

  // The logits of tokens [begin, end) of the golden's prompt, after those before them.
  static std::vector<float> logits(engine::InferEngine& engine, int64_t begin, int64_t end) {
    const Tensor prompt = io::open_weights(path("expected.safetensors").string())->get("prompt");
    engine::InferEngine::Input input;
    input.input_ids.assign(prompt.view.as<int32_t>() + begin, prompt.view.as<int32_t>() + end);
    input.input_lengths = {static_cast<int32_t>(end - begin)};
    input.cache_lengths = {static_cast<int32_t>(begin)};
    input.all_logits = true;
    engine.forward(input);
    const Tensor result = engine.logits();
    return {result.view.as<float>(), result.view.as<float>() + result.view.num_elements()};
  }
  static std::vector<float> logits_of(const Checkpoint& checkpoint) { return logits(*engine_of(checkpoint), 0, 40); }

  // Logits within the error of f32.
  static void expect_exact(const std::vector<float>& actual) {
    const auto expected = io::open_weights(path("expected.safetensors").string());
    const Tensor exact = expected->get("logits_f64"), single = expected->get("logits");
    const auto of = [](const Tensor& tensor) { return [&](size_t i) { return tensor.view.as<float>()[i]; }; };
    test::expect_f32_error(test::deviation(
                               actual.size(), [&](size_t i) { return actual[i]; }, of(exact)),
                           test::deviation(actual.size(), of(single), of(exact)), GetParam().folder);
  }

  std::string write_gguf(const io::GgufMetadata& metadata) const {
    const ParameterReader reader(golden_);
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const auto& [name, recipe] : tensors_of(*golden_.model, CheckpointFormat::gguf)) {
      kept.push_back(evaluate(
          recipe, [&](const std::string& own) { return reader.read(own); }, name));
      tensors.push_back({name, kept.back().view});
    }
    std::vector<std::pair<std::string_view, std::vector<double>>> constants = {
        {"rope_freqs.weight", gguf_divisors(*golden_.model->config())},
        {kLongFactors, golden_.model->config()->rope_scaling.long_factor},
        {kShortFactors, golden_.model->config()->rope_scaling.short_factor}};
    for (const auto& [name, values] : constants) {
      if (values.empty()) continue;
      kept.push_back(Tensor::on_host(DType::f32, Shape{std::ssize(values)}));
      for (size_t i = 0; i < values.size(); ++i) kept.back().view.as<float>()[i] = static_cast<float>(values[i]);
      tensors.push_back({std::string(name), kept.back().view});
    }
    std::string file = (folder_ / "model.gguf").string();
    io::write_gguf(file, metadata, tensors);
    return file;
  }

  fs::path folder_;
  Checkpoint golden_;
};

TEST_P(Families, ChunksHaveTheBitsOfTheWholePrompt) {
  const std::vector<float> whole = logits_of(golden_);
  const auto engine = engine_of(golden_);
  std::vector<float> parts;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 7}, {7, 8}, {8, 29}, {29, 40}})
    for (float value : logits(*engine, begin, end)) parts.push_back(value);
  ASSERT_EQ(parts.size(), whole.size());
  EXPECT_EQ(std::memcmp(parts.data(), whole.data(), whole.size() * sizeof(float)), 0);
}

TEST_P(Families, ConfigurationsAreWrittenAsTheyAreRead) {
  const ModelConfig& config = *golden_.model->config();
  const io::JsonReader written = io::JsonReader::parse(io::to_json(config.to_json()), "config.json");
  EXPECT_EQ(ModelConfig::from_json(written), config);
  // transformers refuses whole numbers where it writes others, and the other way around.
  const io::JsonReader stated = io::JsonReader::read(path("config.json").string());
  for (const io::JsonMember& member : written.value().as_object()) {
    const io::JsonValue* other = stated.value().find(member.key);
    if (other == nullptr || other->is_null()) continue;
    EXPECT_EQ(member.value.kind(), other->kind()) << member.key;
  }
  const fs::path classic = path("config.classic.json");
  if (!fs::exists(classic)) return;
  EXPECT_EQ(io::to_json(ModelConfig::from_json(io::JsonReader::read(classic.string())).describe()),
            io::to_json(config.describe()));
}

// The names are those of the gguf package.
TEST_P(Families, TensorsOfGgufFilesHaveTheirNames) {
  if (GetParam().quantized) return;
  const std::vector<std::string> expected = io::JsonReader::read(path("step.json").string()).strings("gguf_names");
  if (expected.empty()) return;
  std::vector<std::string> names;
  for (const auto& [name, recipe] : tensors_of(*golden_.model, CheckpointFormat::gguf)) names.push_back(name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, expected);
}

// To GGUF, which the family may refuse, and back. A norm's 1 + w is rounded, and so is the exponential of a decay's
// logarithm, of which exp and log make at most 4 u (1 + |a|), with |a| < 3.
TEST_P(Families, ConvertsToGgufAndBack) {
  if (GetParam().gguf_refusal != nullptr) {
    EXPECT_HAS(test::refusal([&] { golden_.model->config()->to_gguf(); }), GetParam().gguf_refusal);
    return;
  }
  const Checkpoint gguf = open_checkpoint(write_gguf(golden_.model->config()->to_gguf()));
  const bool exact = GetParam().gguf == GoldenFamily::Gguf::exact;
  if (exact && gguf.model->config()->rope_style == golden_.model->config()->rope_style)
    EXPECT_EQ(logits_of(gguf), logits_of(golden_));
  else  // rows of q and k, or heads, in another order: their products are summed in another order
    expect_exact(logits_of(gguf));
  const Checkpoint back = huggingface_form(gguf);
  for (const Checkpoint* other : {&gguf, &back})
    EXPECT_EQ(other->model->config()->rope_scaling.long_factor, golden_.model->config()->rope_scaling.long_factor);
  if (GetParam().quantized) {
    EXPECT_EQ(gguf.weights->find("blk.0.ffn_up_exps.weight")->type_name, "MXFP4");
    return expect_exact(logits_of(back));
  }
  if (exact)
    EXPECT_EQ(logits_of(back), logits_of(golden_));
  else
    expect_exact(logits_of(back));
  ASSERT_EQ(back.weights->tensors().size(), golden_.weights->tensors().size());
  if (GetParam().gguf == GoldenFamily::Gguf::folded) return;
  for (const io::WeightInfo& info : golden_.weights->tensors()) {
    const Tensor a = golden_.weights->get(info.name), b = back.weights->get(info.name);
    ASSERT_EQ(to_string(a.view), to_string(b.view));
    if (!is_floating(a.dtype())) {
      ASSERT_EQ(std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())), 0) << info.name;
      continue;
    }
    const std::string& type = golden_.model->config()->model_type;
    const bool sums =
        (type == "gemma2" || type == "gemma3_text" || type.starts_with("qwen3_")) && info.name.ends_with("norm.weight");
    // An exponential and its logarithm, of numbers below 2.
    const bool logarithms = !exact && info.name.ends_with("A_log");
    for (int64_t i = 0; i < a.view.num_elements(); ++i)
      ASSERT_NEAR(a.view.as<float>()[i], b.view.as<float>()[i], logarithms ? 0x1p-20 : sums ? 0x1p-23 : 0) << info.name;
  }
}

// The context is the end of every cache.
TEST_P(Families, NoCacheIsLongerThanTheContext) {
  engine::EngineOptions options;
  const int64_t context = golden_.model->info().max_positions;
  options.cache = engine::StaticKVCacheConfig{.max_cache_len = context + 1};
  EXPECT_HAS(test::refusal([&] {
               engine::InferEngine::from_checkpoint(golden_, open_device("cpu", {.num_threads = 1}), options);
             }),
             fmt::format("max_cache_len is {}; the model's context is {} tokens", context + 1, context));
}

TEST_P(Families, NoSequenceOfTrainingIsLongerThanTheContext) {
  if (GetParam().quantized) return;
  const int64_t context = golden_.model->info().default_context();
  train::Trainer trainer(golden_.model, open_device("cpu", {.num_threads = 1}), {.batch_tokens = context + 1});
  trainer.load(golden_);
  const std::vector<uint32_t> document(static_cast<size_t>(context + 2), 3);
  train::Batch batch;
  train::clear(batch);
  train::append_piece(batch, document, 0, context + 1);
  EXPECT_HAS(test::refusal([&] { trainer.step(std::span(&batch, 1), 1e-3); }),
             fmt::format("sequence 0 of the batch has {} tokens; the model's context is {}", context + 1, context));
}

io::JsonValue golden_json(const char* folder) {
  const std::string file = (fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / folder / "config.json").string();
  return io::parse_json(io::to_json(io::JsonReader::read(file).value()), file);
}

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

// transformers reads a theta of gpt_neox from no other key, unless the rope's object has one.
TEST(FamilyConfigs, ThetaOfGptNeoxHasAKeyOfItsOwn) {
  io::JsonValue json = golden_json("gpt_neox");
  const io::JsonValue written = parse(json).to_json();
  EXPECT_EQ(written.find("rope_theta"), nullptr);
  ASSERT_NE(written.find("rotary_emb_base"), nullptr);
  json.set("rope_parameters", nullptr);
  EXPECT_EQ(parse(json).rope_theta, 10000);
  json.set("rotary_emb_base", 500);
  EXPECT_EQ(parse(json).rope_theta, 500);
  json.set("rope_theta", 600);
  EXPECT_HAS(test::refusal([&] { parse(json); }), "'rope_theta' is 600 and 'rotary_emb_base' 500");
  json.set("rope_parameters", io::JsonValue::object().set("rope_theta", 700)).set("rope_theta", 500);
  EXPECT_EQ(parse(json).rope_theta, 700);
}

TEST(FamilyConfigs, ThetasThatRopeObjectsLackAreTheDefaults) {
  for (const auto& [folder, theta] : {std::pair{"smollm3", 2000000.0}, {"ernie4_5", 500000.0}, {"granite", 10000.0}}) {
    io::JsonValue json = golden_json(folder);
    json.set("rope_parameters", io::JsonValue::object().set("rope_type", "linear").set("factor", 2.0));
    EXPECT_EQ(parse(json).rope_theta, theta) << folder;
  }
}

// Every even part of every head dimension is written as a factor that truncation takes back to it.
TEST(FamilyConfigs, PartialRotaryFactorsReadBack) {
  const auto glm4 = [](int64_t head_dim, double share) {
    io::JsonValue json = golden_json("glm4");
    json.set("rope_parameters", nullptr).set("head_dim", head_dim).set("partial_rotary_factor", share);
    return parse(json);
  };
  EXPECT_EQ(glm4(8, 0.5).rotary_dim, 4);
  EXPECT_EQ(glm4(8, 0.8).rotary_dim, 6);  // 6.4 of 8
  for (int64_t head_dim : {8, 80, 96, 98, 106, 128, 192, 256})
    for (int64_t rotary_dim = 2; rotary_dim <= head_dim; rotary_dim += 2) {
      ModelConfig config = glm4(head_dim, 1);
      config.rotary_dim = rotary_dim;
      EXPECT_EQ(parse(config.to_json()).rotary_dim, rotary_dim) << "of " << head_dim;
    }
}

// Phi 3 states its original context beside the rope's object, which is 4096 where it does not.
TEST(FamilyConfigs, OriginalContextOfPhi3IsNotThatOfTheRope) {
  io::JsonValue json = golden_json("phi3"), rope = *json.find("rope_parameters");
  json.set("rope_parameters", rope.set("original_max_position_embeddings", 70));
  EXPECT_EQ(parse(json).rope_scaling.original_max_positions, 80);
  json.set("original_max_position_embeddings", nullptr);
  EXPECT_EQ(parse(json).rope_scaling.original_max_positions, 4096);
}

TEST(FamilyConfigs, AWindowIsWrittenThoughNoLayerHasIt) {
  for (const char* folder : {"gemma2", "olmo3", "cohere2", "gpt_oss"}) {
    io::JsonValue json = golden_json(folder), types = io::JsonValue::array();
    for (size_t i = 0; i < json.find("layer_types")->as_array().size(); ++i) types.push_back("full_attention");
    const ModelConfig config = parse(json.set("layer_types", types));
    const io::JsonValue written = config.to_json();
    EXPECT_EQ(*written.find("sliding_window"), io::JsonValue(config.max_position_embeddings)) << folder;
    EXPECT_EQ(*written.find("layer_types"), types) << folder;
    EXPECT_EQ(parse(written), config) << folder;
  }
}

// Some model types have switches that change results and are not implemented: they are refused.
TEST(FamilyConfigs, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* folder, const char* key, const io::JsonValue& value) {
    io::JsonValue json = golden_json(folder);
    json.set(key, value);
    return test::refusal([&] { parse(json); });
  };
  EXPECT_HAS(refused("gemma2", "use_bidirectional_attention", true), "only causal attention is honoured");
  EXPECT_HAS(refused("smollm3_window", "sliding_window", nullptr), "'sliding_window'");  // layer_types has windows
  for (const char* hybrid : {"falcon_h1", "granitemoehybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear"}) {
    EXPECT_HAS(refused(hybrid, "hidden_act", "gelu"), "'hidden_act' is \"gelu\"; ");
    EXPECT_HAS(refused(hybrid, "hidden_act", "gelu"), "have silu alone");
  }
  EXPECT_HAS(refused("cohere2_full", "sliding_window", nullptr), "'sliding_window' is null; expected an integer");
  EXPECT_HAS(refused("gpt2", "add_cross_attention", true), "'add_cross_attention'");
  EXPECT_HAS(refused("granite", "attention_multiplier", "wide"), "attention_multiplier");
  EXPECT_HAS(refused("olmo2", "clip_qkv", 8.0), "'clip_qkv'");
  EXPECT_HAS(refused("hunyuan_v1_dense", "use_qk_norm", false), "only true is honoured");
  EXPECT_EQ(refused("exaone4", "sliding_window_pattern", "LLLG"), "");  // layer_types says it
  EXPECT_EQ(refused("gpt2", "summary_type", "first"), "");
  EXPECT_EQ(refused("starcoder2", "residual_dropout", 0.1), "");
}

// A gradient is that of the value, to which a recipe may add a number.
WeightRecipe without_sums(const WeightRecipe& recipe) {
  if (recipe.kind == WeightRecipe::Kind::add) return without_sums(recipe.parts[0]);
  return recipe;
}

TEST_P(Families, ATrainingStepHasTheGradientsOfPyTorch) {
  if (GetParam().quantized) return;
  const Tensor ids = io::open_weights(path("step.safetensors").string())->get("tokens");
  const io::JsonReader json = io::JsonReader::read(path("step.json").string());
  const io::JsonReader f32 = json.object("f32"), f64 = json.object("f64");
  train::Trainer trainer(golden_.model, open_device("cpu", {.num_threads = 2}), {.batch_tokens = 64});
  trainer.load(golden_);
  std::vector<uint32_t> document;
  for (int64_t i = 0; i < ids.view.num_elements(); ++i)
    document.push_back(static_cast<uint32_t>(ids.view.as<int32_t>()[i]));
  train::Batch batch;
  train::clear(batch);
  train::append_piece(batch, document, 0, ids.view.num_elements() - 1);
  const train::StepResult result = trainer.step(std::span(&batch, 1), 1e-3);
  // PyTorch's own error is a measure of ours, and a hundred units in the last place no loss of precision.
  const auto expect_near = [](double actual, double single, double exact, const std::string& what) {
    EXPECT_NEAR(actual, exact, 8 * std::abs(single - exact) + 100 * 0x1p-23 * std::abs(exact)) << what;
  };
  expect_near(result.loss, f32.number("loss"), f64.number("loss"), "loss");
  const io::JsonReader norms32 = f32.object("gradients"), norms64 = f64.object("gradients");
  std::set<std::string> frozen;
  for (const ParameterInfo& parameter : golden_.model->parameters())
    if (!parameter.trainable) frozen.insert(parameter.name);
  size_t compared = 0;
  for (const auto& [name, recipe] : tensors_of(*golden_.model, CheckpointFormat::huggingface)) {
    if (frozen.contains(recipe.names().front())) continue;
    const Tensor gradient = evaluate(
        without_sums(recipe), [&](const std::string& parameter) { return trainer.gradient(parameter); }, name);
    double squares = 0;
    for (int64_t i = 0; i < gradient.view.num_elements(); ++i)
      squares += std::pow(static_cast<double>(gradient.view.as<float>()[i]), 2);
    expect_near(std::sqrt(squares), norms32.number(name), norms64.number(name), name);
    ++compared;
  }
  EXPECT_EQ(compared, norms64.value().as_object().size());
}

TEST(NormsOverAllHeads, AreNotDividedOverTensorParallelRanks) {
  for (const char* name : {"olmo2", "olmoe"}) {
    const Checkpoint golden = open_checkpoint((fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / name).string());
    const auto device = open_device("cpu", {.num_threads = 1});
    const auto hardware = modules::AutoHardwareConfig::from_model_spec(golden.model->spec(), *device,
                                                                       HardwareMode::accuracy, {}, "the test");
    EXPECT_HAS(test::refusal([&] {
                 build_training_graph(*golden.model, {.device = device.get(), .hardware = &hardware, .num_ranks = 2});
               }),
               "norms over all");
  }
}

INSTANTIATE_TEST_SUITE_P(Transformers, Families, testing::ValuesIn(test::kGoldenFamilies),
                         [](const auto& info) { return std::string(info.param.folder); });

}  // namespace
}  // namespace eadem::models
