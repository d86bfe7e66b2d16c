// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints and models: what fits loads and computes what it should; what does not is refused by name.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "tests/support/f32_error.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

using test::refusal;

namespace fs = std::filesystem;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";
const fs::path kFixtures = fs::path(EADEM_SHARED_DATA) / "models/random/mlxd-fixtures";

std::shared_ptr<Device> cpu() { return open_device("cpu", {.num_threads = 1}); }

std::unique_ptr<engine::InferEngine> load(const std::string& path) {
  engine::EngineOptions options;
  options.mode = HardwareMode::accuracy;
  options.hardware.weights = DType::f32;
  options.max_logit_rows = 128;
  options.max_num_batched_tokens = 128;
  return engine::InferEngine::from_checkpoint(open_checkpoint(path), cpu(), options);
}

// Logits of every token of the prompt.
Tensor logits_of(engine::InferEngine& engine, const TensorView& prompt) {
  engine::InferEngine::Input input;
  input.input_ids.assign(prompt.as<int32_t>(), prompt.as<int32_t>() + prompt.num_elements());
  input.input_lengths = {static_cast<int32_t>(input.input_ids.size())};
  input.cache_lengths = {0};
  input.all_logits = true;
  engine.forward(input);
  return engine.logits();
}

double largest_difference(const TensorView& a, const TensorView& b) {
  EXPECT_EQ(a.shape, b.shape);
  double largest = 0;
  for (int64_t i = 0; i < a.num_elements(); ++i) {
    const double difference = std::abs(static_cast<double>(a.as<float>()[i]) - b.as<float>()[i]);
    largest = difference <= largest ? largest : difference;  // NaN stays
  }
  return largest;
}

// A copy of the golden `llama` whose tensors a test may change.
class SpoiledCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_models_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    fs::copy(kGoldens / "llama/config.json", folder_ / "config.json");
    source_ = io::open_weights((kGoldens / "llama").string());
    for (const io::WeightInfo& info : source_->tensors()) tensors_[info.name] = source_->get(info.name);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string file() const { return (folder_ / "model.safetensors").string(); }
  void write() const {
    std::vector<io::NamedTensor> named;
    for (const auto& [name, tensor] : tensors_) named.push_back({name, tensor.view});
    io::write_safetensors(file(), named);
  }
  std::string refusal_of_written() const {
    write();
    return refusal([&] { load(folder_.string()); });
  }

  fs::path folder_;
  std::shared_ptr<const io::WeightSource> source_;
  std::map<std::string, Tensor> tensors_;
};

TEST_F(SpoiledCheckpoint, UnchangedLoads) { EXPECT_EQ(refusal_of_written(), ""); }

TEST_F(SpoiledCheckpoint, MissingTensor) {
  tensors_.erase("model.layers.1.mlp.up_proj.weight");
  const std::string text = refusal_of_written();
  EXPECT_HAS(text, "NotFound: " + file());
  EXPECT_HAS(text, "'model.layers.1.mlp.up_proj.weight'");
  EXPECT_HAS(text, "[56, 64]");
}

TEST_F(SpoiledCheckpoint, ExtraTensor) {
  tensors_["model.layers.2.mlp.up_proj.weight"] = tensors_["model.layers.1.mlp.up_proj.weight"];
  const std::string text = refusal_of_written();
  EXPECT_HAS(text, "DataCorrupted: " + file());
  EXPECT_HAS(text, "'model.layers.2.mlp.up_proj.weight' F32 [56, 64]");
  EXPECT_HAS(text, (folder_ / "config.json").string());
}

TEST_F(SpoiledCheckpoint, TensorsThatFollowFromTheConfigMayBeThere) {
  tensors_["model.layers.0.self_attn.rotary_emb.inv_freq"] = Tensor::on_host(DType::f32, Shape{8});
  std::memset(tensors_["model.layers.0.self_attn.rotary_emb.inv_freq"].view.data, 0, 32);
  EXPECT_EQ(refusal_of_written(), "");
}

TEST_F(SpoiledCheckpoint, WrongShapeNamesBoth) {
  const Tensor narrow = Tensor::on_host(DType::f32, Shape{64, 55});
  std::memset(narrow.view.data, 0, narrow.view.size_bytes());
  tensors_["model.layers.0.mlp.down_proj.weight"] = narrow;
  const std::string text = refusal_of_written();
  EXPECT_HAS(text, "InvalidArgument: " + file());
  EXPECT_HAS(text, "'model.layers.0.mlp.down_proj.weight' is [64, 55]");
  EXPECT_HAS(text, "[64, 56]");
}

TEST_F(SpoiledCheckpoint, NotFiniteNamesThePlace) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Tensor good = source_->get("model.norm.weight");
    const Tensor spoiled = Tensor::on_host(DType::f32, good.shape());
    std::memcpy(spoiled.view.data, good.view.data, good.view.size_bytes());
    spoiled.view.as<float>()[17] = bad;
    tensors_["model.norm.weight"] = spoiled;
    const std::string text = refusal_of_written();
    EXPECT_HAS(text, "InvalidArgument: " + file());
    EXPECT_HAS(text, "'model.norm.weight'");
    EXPECT_HAS(text, "index 17");
  }
}

TEST_F(SpoiledCheckpoint, IntegersAreNoWeights) {
  const Tensor integers = Tensor::on_host(DType::i32, Shape{64});
  std::memset(integers.view.data, 0, integers.view.size_bytes());
  tensors_["model.norm.weight"] = integers;
  EXPECT_HAS(refusal_of_written(), "'model.norm.weight' is i32");
}

TEST_F(SpoiledCheckpoint, TruncatedFile) {
  write();
  const auto size = fs::file_size(file());
  for (const auto kept : {size - 1, size / 2, uintmax_t{100}, uintmax_t{7}, uintmax_t{0}}) {
    fs::resize_file(file(), kept);
    const std::string text = refusal([&] { load(folder_.string()); });
    EXPECT_NE(text, "") << kept;
    EXPECT_HAS(text, file());
  }
}

TEST_F(SpoiledCheckpoint, MissingConfig) {
  write();
  fs::remove(folder_ / "config.json");
  EXPECT_HAS(refusal([&] { load(folder_.string()); }), "NotFound: " + (folder_ / "config.json").string());
}

// Models that another program made. The golden holds PyTorch's f32 logits, and how far these are from f64 at most; ours
// may be test::kF32ErrorRatio times as far, and the two errors may add.
class Fixture : public testing::TestWithParam<const char*> {};

TEST_P(Fixture, LogitsMatchTransformers) {
  const fs::path folder = kFixtures / GetParam();
  if (!fs::exists(folder)) GTEST_SKIP() << folder << " is absent";
  const fs::path golden = kGoldens / "fixtures" / GetParam();
  const auto expected = io::open_weights(golden.string() + ".safetensors");
  const double torch_error = io::JsonReader::read(golden.string() + ".json").number("max_abs_diff_f32_f64");
  const auto engine = load(folder.string());
  const Tensor actual = logits_of(*engine, expected->get("prompt").view);
  EXPECT_LE(largest_difference(actual.view, expected->get("logits").view), (test::kF32ErrorRatio + 1) * torch_error);
}

INSTANTIATE_TEST_SUITE_P(Models, Fixture, testing::Values("tiny_llama3", "tiny_mistral", "tiny_qwen3"));

TEST(Checkpoints, FourBitFixturesAreRefused) {
  if (!fs::exists(kFixtures)) GTEST_SKIP() << kFixtures << " is absent";
  for (const char* name : {"tiny_llama3_tied", "tiny_qwen3_tied", "tiny_qwen3_sharded"}) {
    const std::string text = refusal([&] { load((kFixtures / name).string()); });
    EXPECT_HAS(text, "Unsupported: " + (kFixtures / name / "config.json").string());
    EXPECT_HAS(text, "'quantization'");
  }
}

TEST(Checkpoints, ShardedBf16) {
  const fs::path folder = kGoldens / "sharded_bf16";
  const auto expected = io::open_weights((folder / "expected.safetensors").string());
  const Tensor exact = expected->get("logits_f64");
  const double torch_error = largest_difference(expected->get("logits").view, exact.view);
  const auto engine = load(folder.string());
  EXPECT_LE(largest_difference(logits_of(*engine, expected->get("prompt").view).view, exact.view),
            test::kF32ErrorRatio * torch_error);
  // The spec takes the dtype from the files.
  const modules::ModelSpec spec = spec_of(open_checkpoint(folder.string()));
  EXPECT_EQ(spec.checkpoint_type, DType::bf16);
  EXPECT_HAS(spec.checkpoint_source, "sharded_bf16");
}

// A head of its own beside an embedding that is said to be tied, also where a family has recipes for the embedding.
TEST(Checkpoints, AHeadThatDiffersFromATiedEmbeddingIsRefused) {
  for (const char* name : {"llama", "gpt2_odd", "deepseek_v4"}) {
    std::string pattern = (fs::temp_directory_path() / "eadem_tied_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    const fs::path folder = pattern;
    fs::copy(kGoldens / name / "model.safetensors", folder / "model.safetensors");
    std::ostringstream text;
    text << std::ifstream(kGoldens / name / "config.json").rdbuf();
    io::JsonValue config = io::parse_json(text.str(), "config.json");
    std::ofstream(folder / "config.json") << io::to_json(config.set("tie_word_embeddings", true));
    EXPECT_HAS(refusal([&] { load(folder.string()); }), "says that they are tied") << name;
    fs::remove_all(folder);
  }
}

TEST(Checkpoints, ParametersAreCountedAsTheyAreStored) {
  for (const char* name : {"llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "sharded_bf16"}) {
    const auto engine = load((kGoldens / name).string());
    EXPECT_EQ(engine->model().spec().num_parameters, engine->parameters().num_parameters()) << name;
    int64_t sum = 0;
    for (const auto& [parameter, tensor] : engine->state_dict()) sum += tensor.view.num_elements();
    EXPECT_EQ(sum, engine->parameters().num_parameters()) << name;
  }
}

TEST(Checkpoints, ProgressEndsAtTheWhole) {
  const Checkpoint checkpoint = open_checkpoint((kGoldens / "llama").string());
  int64_t last = 0, whole = -1;
  engine::InferEngine::from_checkpoint(checkpoint, cpu(), {}, [&](int64_t done, int64_t total) {
    EXPECT_GE(done, last);
    last = done;
    whole = total;
  });
  EXPECT_EQ(last, whole);
}

// A store with one matrix, filled by that many threads, and the progress that was reported.
Tensor random_matrix(int64_t rows, int64_t columns, int threads, std::vector<int64_t>* progress = nullptr) {
  pipeline::ParameterStore store(open_device("cpu", {.num_threads = threads}));
  store.declare("a.weight", TensorType(DType::f32, {rows, columns}));
  store.layout("a.weight", nullptr);
  load_random(store, 7, 0.5, [&](int64_t done, int64_t total) {
    if (progress != nullptr) *progress = {done, total};
  });
  return store.to_host("a.weight");
}

// A store with some parameters, filled at random.
std::map<std::string, Tensor> random_values(const std::vector<std::string>& matrices, uint64_t seed) {
  pipeline::ParameterStore store(cpu());
  std::map<std::string, Tensor> values;
  for (const std::string& name : matrices) {
    store.declare(name, TensorType(DType::f32, {33, 31}));
    store.layout(name, nullptr);
  }
  store.declare("norm.weight", TensorType(DType::f32, {5}));
  store.layout("norm.weight", nullptr);
  store.declare("proj.bias", TensorType(DType::f32, {5}));
  store.layout("proj.bias", nullptr);
  load_random(store, seed, 0.5);
  for (const std::string& name : store.names()) values[name] = store.to_host(name);
  return values;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.view.size_bytes() == b.view.size_bytes() && std::memcmp(a.view.data, b.view.data, a.view.size_bytes()) == 0;
}

// Threads fill blocks of 65536 values; a larger matrix begins with the values of a smaller one.
TEST(LoadRandom, DoesNotDependOnThreads) {
  std::vector<int64_t> progress;
  const Tensor one = random_matrix(301, 1003, 1, &progress);
  EXPECT_EQ(progress, (std::vector<int64_t>{301 * 1003, 301 * 1003}));
  EXPECT_TRUE(same_bytes(one, random_matrix(301, 1003, 2)));
  EXPECT_TRUE(same_bytes(one, random_matrix(301, 1003, 5)));
  const Tensor small = random_matrix(1, 1003, 1);
  EXPECT_EQ(std::memcmp(one.view.data, small.view.data, small.view.size_bytes()), 0);
}

TEST(LoadRandom, DependsOnSeedAndNameAlone) {
  auto alone = random_values({"b.weight"}, 7);
  auto among = random_values({"a.weight", "b.weight", "c.weight"}, 7);
  EXPECT_TRUE(same_bytes(alone["b.weight"], among["b.weight"]));
  EXPECT_FALSE(same_bytes(among["a.weight"], among["b.weight"]));
  EXPECT_FALSE(same_bytes(alone["b.weight"], random_values({"b.weight"}, 8)["b.weight"]));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(alone["norm.weight"].view.as<float>()[i], 1.0f);
    EXPECT_EQ(alone["proj.bias"].view.as<float>()[i], 0.0f);
  }
  // Mean and deviation of 1023 normal values: five standard errors of each.
  const Tensor& values = alone["b.weight"];
  const auto count = static_cast<double>(values.view.num_elements());
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < values.view.num_elements(); ++i) {
    sum += values.view.as<float>()[i];
    squares += static_cast<double>(values.view.as<float>()[i]) * values.view.as<float>()[i];
  }
  EXPECT_NEAR(sum / count, 0.0, 5 * 0.5 / std::sqrt(count));
  EXPECT_NEAR(std::sqrt(squares / count), 0.5, 5 * 0.5 / std::sqrt(2 * count));
}

}  // namespace
}  // namespace eadem::models
