// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints whose files say what the goldens say in the other ways that transformers accepts: keys that are absent,
// null or of other programs, and tied weights under either name (tests/data/spellings).
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/safetensors.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;
using io::JsonValue;

const fs::path kData = fs::path(EADEM_SOURCE_DIR) / "tests/data";
constexpr int64_t kMaxFileBytes = 1 << 24;

JsonValue read_json(const fs::path& path) {
  return io::parse_json(io::read_file(path.string(), kMaxFileBytes), path.string());
}

// The members of an object in a row, or nothing.
const JsonValue::Object& members(const JsonValue& row, std::string_view key) {
  static const JsonValue::Object none;
  const JsonValue* found = row.find(key);
  return found == nullptr ? none : found->as_object();
}

const JsonValue::Array& elements(const JsonValue& row, std::string_view key) {
  static const JsonValue::Array none;
  const JsonValue* found = row.find(key);
  return found == nullptr ? none : found->as_array();
}

// The golden's configuration with the changes of a row, as make_spellings.py makes them.
JsonValue changed_config(const JsonValue& row) {
  JsonValue::Object config = read_json(kData / "golden" / row.find("base")->as_string() / "config.json").as_object();
  for (const JsonValue& key : elements(row, "remove"))
    std::erase_if(config, [&](const io::JsonMember& member) { return member.key == key.as_string(); });
  JsonValue result(std::move(config));
  for (const io::JsonMember& member : members(row, "set")) result.set(member.key, member.value);
  for (const JsonValue& key : elements(row, "float"))
    result.set(key.as_string(), result.find(key.as_string())->as_number());
  if (row.find("rope") != nullptr) {
    JsonValue rope = *result.find("rope_parameters");
    for (const io::JsonMember& member : members(row, "rope")) rope.set(member.key, member.value);
    result.set("rope_parameters", rope);
  }
  return result;
}

Tensor plus_one(const Tensor& tensor) {
  const Tensor result = Tensor::on_host(DType::f32, tensor.shape());
  for (int64_t i = 0; i < tensor.view.num_elements(); ++i)
    result.view.as<float>()[i] = tensor.view.as<float>()[i] + 1.0f;
  return result;
}

void write_checkpoint(const JsonValue& row, const fs::path& folder) {
  std::ofstream(folder / "config.json") << io::to_json(changed_config(row));
  const auto source = io::open_weights((kData / "golden" / row.find("base")->as_string()).string());
  std::map<std::string, Tensor> tensors;
  for (const io::WeightInfo& info : source->tensors()) tensors[info.name] = source->get(info.name);
  for (const io::JsonMember& rename : members(row, "rename")) {
    tensors[rename.value.as_string()] = tensors[rename.key];
    tensors.erase(rename.key);
  }
  for (const io::JsonMember& copy : members(row, "copy")) tensors[copy.value.as_string()] = tensors[copy.key];
  for (const JsonValue& name : elements(row, "add_one"))
    tensors[name.as_string()] = plus_one(tensors[name.as_string()]);
  for (const JsonValue& name : elements(row, "drop")) tensors.erase(name.as_string());
  std::vector<io::NamedTensor> named;
  for (const auto& [name, tensor] : tensors) named.push_back({name, tensor.view});
  io::write_safetensors((folder / "model.safetensors").string(), named);
}

// Logits of the golden's prompt.
std::vector<float> logits_of(const fs::path& folder, const std::string& base) {
  engine::EngineOptions options;
  options.max_logit_rows = options.max_num_batched_tokens = 128;
  options.cache = engine::StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = 128};
  const auto engine = engine::InferEngine::from_checkpoint(
      open_checkpoint(folder.string()), open_device("cpu", {.num_threads = 1}), options, {}, Logger(LogLevel::off));
  const auto expected = io::open_weights((kData / "golden" / base / "expected.safetensors").string());
  const Tensor prompt = expected->get("prompt");
  engine::InferEngine::Input input;
  input.input_ids.assign(prompt.view.as<int32_t>(), prompt.view.as<int32_t>() + prompt.view.num_elements());
  input.input_lengths = {static_cast<int32_t>(input.input_ids.size())};
  input.cache_lengths = {0};
  input.all_logits = true;
  engine->forward(input);
  const Tensor logits = engine->logits();
  return {logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements()};
}

class Spellings : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_spellings_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path folder_;
};

TEST_F(Spellings, GiveTheBitsOfTheGoldensWhereTheyDoInTransformers) {
  std::map<std::string, std::vector<float>> wanted;
  std::map<std::string, int> count;
  const JsonValue rows = read_json(kData / "spellings/spellings.json");
  for (const JsonValue& row : rows.as_array()) {
    const std::string base = row.find("base")->as_string();
    SCOPED_TRACE(base + ": " + row.find("name")->as_string());
    write_checkpoint(row, folder_);
    const JsonValue* own = row.find("eadem");
    const std::string verdict = (own != nullptr ? own : row.find("transformers"))->as_string();
    ++count[verdict];
    // A config that transformers refuses may load here, where types are looser. It may not end the program.
    const bool must_load = verdict != "refused", must_fail = own != nullptr && verdict == "refused";
    std::vector<float> found;
    const std::string refused = test::refusal([&] { found = logits_of(folder_, base); });
    if (must_load) {
      EXPECT_EQ(refused, "");
    }
    if (must_fail) {
      EXPECT_NE(refused, "");
    }
    if (!refused.empty()) continue;
    const Checkpoint checkpoint = open_checkpoint(folder_.string());
    if (const JsonValue* positions = row.find("max_position_embeddings")) {
      EXPECT_EQ(checkpoint.model->info().max_positions, positions->as_integer());
    }
    if (verdict != "same") continue;
    if (!wanted.contains(base)) wanted[base] = logits_of(kData / "golden" / base, base);
    EXPECT_EQ(found, wanted[base]);
  }
  EXPECT_GT(count["same"], 80);
  EXPECT_GT(count["refused"], 30);
}

TEST_F(Spellings, TiedWeightsThatDifferAreRefusedByBothNames) {
  const JsonValue rows = read_json(kData / "spellings/spellings.json");
  for (const JsonValue& row : rows.as_array()) {
    if (row.find("add_one") == nullptr) continue;
    write_checkpoint(row, folder_);
    const std::string refused = test::refusal([&] { logits_of(folder_, row.find("base")->as_string()); });
    EXPECT_HAS(refused, "DataCorrupted: " + (folder_ / "model.safetensors").string());
    EXPECT_HAS(refused, "'model.embed_tokens.weight' F32");
    EXPECT_HAS(refused, "'lm_head.weight' F32");
    EXPECT_HAS(refused, "\"tie_word_embeddings\": false");
  }
}

// transformers takes defaults of generation from config.json only where there is no generation_config.json.
TEST_F(Spellings, SamplingInAConfigCountsWithoutGenerationConfigOnly) {
  JsonValue config = read_json(kData / "golden/llama/config.json");
  std::ofstream(folder_ / "config.json") << io::to_json(config.set("temperature", 0.9));
  EXPECT_HAS(test::refusal([&] { open_config(folder_.string()); }),
             "'temperature' is 0.9; only 1 is honoured (it is a default of generation");
  std::ofstream(folder_ / "generation_config.json") << "{}";
  EXPECT_EQ(test::refusal([&] { open_config(folder_.string()); }), "");
}

// A load says in one line which keys of other programs it ignores, and nothing of those that transformers writes.
TEST_F(Spellings, OneWarningNamesUnusualKeys) {
  fs::copy_file(kData / "golden/llama/model.safetensors", folder_ / "model.safetensors");
  const auto warnings = [&](const JsonValue& config) {
    std::ofstream(folder_ / "config.json") << io::to_json(config);
    std::vector<std::string> lines;
    const Logger log(LogLevel::info, [&](LogLevel, std::string_view line) { lines.emplace_back(line); });
    engine::InferEngine::from_checkpoint(open_checkpoint(folder_.string()), open_device("cpu", {.num_threads = 1}), {},
                                         {}, log);
    return lines;
  };
  JsonValue config = read_json(kData / "golden/llama/config.json");
  config.set("use_cache", false).set("_attn_implementation_autoset", true);
  EXPECT_EQ(warnings(config), std::vector<std::string>{});
  config.set("unsloth_version", "2025.3").set("transformers.js_config", JsonValue::object().set("a", 1));
  EXPECT_EQ(warnings(config), std::vector<std::string>{(folder_ / "config.json").string() +
                                                       ": ignored, for they change nothing: 'unsloth_version', "
                                                       "'transformers.js_config' (eadem inspect says why)"});
}

}  // namespace
}  // namespace eadem::models
