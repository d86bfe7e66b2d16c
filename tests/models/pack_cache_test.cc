// SPDX-License-Identifier: Apache-2.0
//
// The pack cache: a model runs from it with the bits that it has without, and whatever is wrong with one is noticed,
// said once, and mended.
#include "eadem/models/pack_cache.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <thread>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf.h"
#include "tests/models/tiny_gguf.h"
#include "tests/support/refusal.h"
#include "tests/support/split_gguf.h"

namespace eadem::models {
namespace pack_cache_test {

namespace fs = std::filesystem;

using test::write_model;

const fs::path kData = fs::path(EADEM_SOURCE_DIR) / "tests/data";

// The log of a load, and the logits of some steps.
struct Loaded {
  std::string warnings, notes;
  std::vector<float> logits;
};

Loaded load(const fs::path& model, const fs::path& cache, const HardwareOverrides& hardware = {},
            const std::function<void(engine::InferEngine&)>& action = {}) {
  Loaded loaded;
  std::mutex mutex;
  const Logger log(LogLevel::info, [&](LogLevel level, std::string_view message) {
    const std::lock_guard lock(mutex);
    (level >= LogLevel::warning ? loaded.warnings : loaded.notes) += std::string(message) + "\n";
  });
  engine::EngineOptions options;
  options.pack_cache = cache.string();
  options.hardware = hardware;
  options.max_logit_rows = 8;
  const auto engine = engine::InferEngine::from_checkpoint(open_checkpoint(model.string()),
                                                           open_device("cpu", {.num_threads = 2}), options, {}, log);
  if (action) action(*engine);
  for (const int32_t tokens : {5, 1}) {
    engine::InferEngine::Input input;
    for (int32_t i = 0; i < tokens; ++i) input.input_ids.push_back(3 + 2 * i);
    input.input_lengths = {tokens};
    input.cache_lengths = {tokens == 1 ? 5 : 0};
    input.all_logits = true;
    engine->forward(input);
    const Tensor logits = engine->logits();
    const float* values = logits.view.as<float>();
    loaded.logits.insert(loaded.logits.end(), values, values + logits.view.num_elements());
  }
  return loaded;
}

class PackCaches : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_pack_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    cache_ = folder_ / "cache";
    model_ = folder_ / "m.gguf";
    write_model(model_, {DType::f32, BlockEncoding::find("q4_k")});
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::vector<fs::path> packs() const {
    std::vector<fs::path> result;
    if (fs::is_directory(cache_))
      for (const auto& entry : fs::directory_iterator(cache_))
        if (entry.path().extension() == ".pack") result.push_back(entry.path());
    return result;
  }
  // The only one.
  fs::path pack() const {
    EXPECT_EQ(packs().size(), 1u);
    return packs().at(0);
  }
  static std::string content(const fs::path& file) { return io::read_file(file.string(), 1 << 30); }
  static void write(const fs::path& file, const std::string& text) { std::ofstream(file, std::ios::binary) << text; }
  // Changes a byte of a file in place, behind the back of its time of modification.
  static void flip(const fs::path& file, size_t position) {
    const auto time = fs::last_write_time(file);
    std::string text = content(file);
    ASSERT_LT(position, text.size());
    text[position] = static_cast<char>(text[position] ^ 1);
    std::fstream(file, std::ios::binary | std::ios::in | std::ios::out) << text;
    fs::last_write_time(file, time);
  }

  // A load that finds nothing wrong and nothing missing, with these logits.
  void expect_served(const std::vector<float>& logits, const HardwareOverrides& hardware = {}) const {
    const Loaded loaded = load(model_, cache_, hardware);
    EXPECT_EQ(loaded.warnings + loaded.notes, "");
    EXPECT_EQ(loaded.logits, logits);
  }
  // A load that warns once, with `reason`; it runs all the same, and the next one has nothing to say.
  void expect_mended(const std::string& reason) const {
    const Loaded loaded = load(model_, cache_);
    EXPECT_HAS(loaded.warnings, reason);
    EXPECT_EQ(std::count(loaded.warnings.begin(), loaded.warnings.end(), '\n'), 1) << loaded.warnings;
    EXPECT_EQ(loaded.logits, load(model_, "").logits);
    expect_served(loaded.logits);
  }

  fs::path folder_, cache_, model_;
};

// ---- The same bits -----------------------------------------------------------------------------------------------

void expect_same_with_and_without(const fs::path& model, const fs::path& cache) {
  const Loaded without = load(model, "");
  EXPECT_EQ(without.warnings + without.notes, "");
  const Loaded first = load(model, cache), second = load(model, cache);
  EXPECT_EQ(first.warnings + second.warnings, "");
  EXPECT_HAS(first.notes, "wrote ");
  EXPECT_EQ(second.notes, "");
  EXPECT_EQ(first.logits, without.logits);
  EXPECT_EQ(second.logits, without.logits);
}

TEST_F(PackCaches, EveryBlockTypeGivesTheSameLogits) {
  for (const BlockEncoding* encoding : BlockEncoding::writable()) {
    SCOPED_TRACE(encoding->name());
    const fs::path model = folder_ / (std::string(encoding->name()) + ".gguf");
    write_model(model, {DType::f32, encoding});
    expect_same_with_and_without(model, cache_);
  }
}

TEST_F(PackCaches, EveryPlainTypeGivesTheSameLogits) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const fs::path model = folder_ / (std::string(dtype_name(dtype)) + ".gguf");
    write_model(model, dtype);
    expect_same_with_and_without(model, cache_);
  }
}

TEST_F(PackCaches, EveryKindOfCheckpointGivesTheSameLogits) {
  for (const char* name : {"golden/llama", "golden/qwen2", "golden/sharded_bf16", "checkpoints/gptq",
                           "checkpoints/gptq_desc_act", "checkpoints/awq", "checkpoints/packed_order",
                           "checkpoints/int8_row", "checkpoints/float8_block", "checkpoints/mixed_formats"}) {
    SCOPED_TRACE(name);
    expect_same_with_and_without(kData / name, cache_);
  }
}

// The pack of a split model is one of all its parts: a change of any of them is noticed.
TEST_F(PackCaches, EveryPartOfASplitFileCounts) {
  const std::vector<std::string> parts = test::split_gguf(model_.string(), (folder_ / "s").string(), 3);
  const std::vector<float> expected = load(model_, "").logits;
  model_ = parts[0];
  expect_same_with_and_without(model_, cache_);
  EXPECT_EQ(load(model_, cache_).logits, expected);
  for (const std::string& part : parts) {
    SCOPED_TRACE(part);
    flip(part, fs::file_size(part) - 40);  // in its last tensor
    expect_mended("was packed from other contents than");
  }
}

TEST_F(PackCaches, ColumnPositionsAreNotTakenFromAPack) {
  load(kData / "checkpoints/gptq_desc_act", cache_);
  const std::string text = content(pack());
  EXPECT_EQ(text.substr(0, text.find(std::string(16, '\0'), 128)).find(" order "), std::string::npos);
}

TEST_F(PackCaches, OtherPrecisionsHaveAPackOfTheirOwn) {
  HardwareOverrides bf16;
  bf16.weights = DType::bf16;
  const Loaded stored = load(model_, cache_), rounded = load(model_, cache_, bf16);
  EXPECT_EQ(stored.warnings + rounded.warnings, "");
  EXPECT_EQ(packs().size(), 2u);
  EXPECT_NE(stored.logits, rounded.logits);
  expect_served(stored.logits);
  expect_served(rounded.logits, bf16);
}

// A parameter that is given anew takes the place of what was mapped; files keep what they hold.
TEST_F(PackCaches, AParameterCanBeReplaced) {
  load(model_, cache_);
  const std::string packed = content(pack()), file = content(model_);
  const auto replace = [](engine::InferEngine& engine) {
    for (const char* name : {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}) {
      Tensor values = engine.parameters().to_host(name);
      if (values.dtype() != DType::f32) values = converted_on_host(values.view, DType::f32);
      for (int64_t i = 0; i < values.view.num_elements(); ++i) values.view.as<float>()[i] *= 0.5f;
      engine.load_param(name, values.view);
    }
  };
  const Loaded cached = load(model_, cache_, {}, replace);
  EXPECT_EQ(cached.logits, load(model_, "", {}, replace).logits);
  EXPECT_NE(cached.logits, load(model_, cache_).logits);
  EXPECT_EQ(content(pack()), packed);
  EXPECT_EQ(content(model_), file);
}

// ---- Staleness ---------------------------------------------------------------------------------------------------

TEST_F(PackCaches, AByteOfTheModelChangedInPlace) {
  load(model_, cache_);
  flip(model_, fs::file_size(model_) - 300);  // in the last matrix
  expect_mended("was packed from other contents than " + model_.string() + " has now; packing again");
}

TEST_F(PackCaches, AnotherModelUnderTheSameName) {
  load(model_, cache_);
  const auto time = fs::last_write_time(model_);
  write_model(folder_ / "other.gguf", {DType::f32, BlockEncoding::find("q4_k")}, 2);
  ASSERT_EQ(fs::file_size(folder_ / "other.gguf"), fs::file_size(model_));
  fs::rename(folder_ / "other.gguf", model_);
  fs::last_write_time(model_, time);
  expect_mended("was packed from other contents");
}

TEST_F(PackCaches, AnotherConfiguration) {
  model_ = folder_ / "llama";
  fs::copy(kData / "golden/llama", model_, fs::copy_options::recursive);
  load(model_, cache_);
  write(model_ / "config.json", content(model_ / "config.json") + "\n");
  expect_mended("was packed from other contents");
}

TEST_F(PackCaches, TheSameModelWithOtherTimesIsCompared) {
  const Loaded loaded = load(model_, cache_);
  fs::copy_file(model_, folder_ / "copy.gguf");
  fs::rename(folder_ / "copy.gguf", model_);
  expect_served(loaded.logits);
}

TEST_F(PackCaches, EveryKindOfDamageToThePack) {
  load(model_, cache_);
  const std::string good = content(pack());
  const struct {
    std::string what, reason;
    std::string content;
  } kCases[] = {
      {"empty", "is no pack file", ""},
      {"truncated in the header", "its header alone takes 128", good.substr(0, 100)},
      {"truncated in the data", "its header says", good.substr(0, good.size() - 1)},
      {"longer", "its header says", good + "x"},
      {"foreign", "is no pack file (it begins with 'GGUF", content(model_)},
      {"of another version", "version 7 of the format", std::string(good).replace(8, 1, "\x07")},
      {"another source", "does not match its checksum", std::string(good).replace(50, 1, "\x99")},
      {"another index", "does not match its checksum", std::string(good).replace(130, 1, "\x99")},
      {"zeros", "is no pack file", std::string(good.size(), '\0')},
      {"other data", "its data does not match its checksum",
       std::string(good).replace(good.size() - 3, 1, 1, static_cast<char>(good[good.size() - 3] ^ 4))},
  };
  for (const auto& damage : kCases) {
    SCOPED_TRACE(damage.what);
    write(pack(), damage.content);
    expect_mended(damage.reason);
    EXPECT_EQ(content(pack()), good);
  }
}

TEST_F(PackCaches, ThePackOfOtherForms) {
  load(model_, cache_);
  const fs::path own = pack();
  HardwareOverrides bf16;
  bf16.weights = DType::bf16;
  load(model_, folder_ / "other", bf16);
  for (const auto& entry : fs::directory_iterator(folder_ / "other"))
    if (entry.path().extension() == ".pack") fs::copy_file(entry.path(), own, fs::copy_options::overwrite_existing);
  expect_mended(" is wanted; packing again");
}

TEST_F(PackCaches, ThePackOfAnotherModelOfTheSameForms) {
  load(model_, cache_);
  const fs::path own = pack();
  write_model(folder_ / "other.gguf", {DType::f32, BlockEncoding::find("q4_k")}, 2);
  load(folder_ / "other.gguf", cache_);
  for (const fs::path& path : packs())
    if (path != own) fs::copy_file(path, own, fs::copy_options::overwrite_existing);
  expect_mended("was packed from other contents");
}

TEST_F(PackCaches, AFolderInThePlaceOfThePack) {
  const Loaded first = load(model_, cache_);
  const fs::path path = pack();
  fs::remove(path);
  fs::create_directories(path / "x");
  const Loaded loaded = load(model_, cache_);
  EXPECT_HAS(loaded.warnings, "it is a directory");
  EXPECT_HAS(loaded.warnings, "the next load packs again");
  EXPECT_EQ(loaded.logits, first.logits);
}

// ---- The stamp ---------------------------------------------------------------------------------------------------

// The files of the source tree are old enough to be told by their times.
TEST_F(PackCaches, AStampStandsForComparing) {
  model_ = kData / "golden/llama";
  const Loaded loaded = load(model_, cache_);
  const fs::path stamp = pack().string() + ".stamp";
  const std::string text = content(stamp);
  EXPECT_HAS(text, "eadem pack stamp 1\n");
  const auto inode = [&] { return io::MappedFile::open(stamp.string())->identity().inode; };
  const auto written = inode();
  expect_served(loaded.logits);
  EXPECT_EQ(inode(), written);  // nothing to write

  // Other times of the pack, damage, nothing: compared, and stamped anew.
  fs::last_write_time(pack(), fs::file_time_type::clock::now());
  expect_served(loaded.logits);
  EXPECT_NE(content(stamp), text);
  const std::string renewed = content(stamp);
  for (const std::string& damaged : {std::string(), std::string("x"), renewed + "x", renewed.substr(1), text}) {
    write(stamp, damaged);
    expect_served(loaded.logits);
    EXPECT_EQ(content(stamp), renewed);
  }
  fs::remove(stamp);
  expect_served(loaded.logits);
  EXPECT_EQ(content(stamp), renewed);
  // A stamp says nothing of a pack that was changed since.
  flip(pack(), fs::file_size(pack()) - 1);
  expect_mended("its data does not match its checksum");
}

// A write changes the time of change, which nobody can set back.
TEST_F(PackCaches, AStampSaysNothingOfAModelThatWasChangedSince) {
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  load(model_, cache_);
  ASSERT_TRUE(fs::exists(pack().string() + ".stamp"));
  flip(model_, fs::file_size(model_) - 300);
  expect_mended("was packed from other contents");
}

TEST_F(PackCaches, AModelJustWrittenIsNotStamped) {
  const Loaded loaded = load(model_, cache_);
  if (fs::exists(pack().string() + ".stamp")) GTEST_SKIP() << "this machine took two seconds to get here";
  expect_served(loaded.logits);
}

// ---- Writing -----------------------------------------------------------------------------------------------------

TEST_F(PackCaches, NothingElseIsLeftInTheFolder) {
  model_ = kData / "golden/llama";
  load(model_, cache_);
  load(model_, cache_);
  EXPECT_EQ(std::distance(fs::directory_iterator(cache_), fs::directory_iterator()), 2);
}

TEST_F(PackCaches, AFolderThatCannotBe) {
  write(folder_ / "file", "");
  const Loaded loaded = load(model_, folder_ / "file/cache");
  EXPECT_HAS(loaded.warnings, "cannot make the folder " + (folder_ / "file/cache").string());
  EXPECT_HAS(loaded.warnings, "the next load packs again");
  EXPECT_EQ(loaded.logits, load(model_, "").logits);
}

TEST_F(PackCaches, NoSpaceForThePack) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{8192, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Loaded loaded = load(model_, cache_);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_HAS(loaded.warnings, "cannot write ");
  EXPECT_HAS(loaded.warnings, "the next load packs again");
  EXPECT_EQ(loaded.logits, load(model_, "").logits);
  EXPECT_TRUE(fs::is_empty(cache_));
}

TEST_F(PackCaches, ConcurrentWritersLeaveOneGoodPack) {
  std::vector<Loaded> loaded(4);
  std::vector<std::thread> threads;
  for (Loaded& result : loaded) threads.emplace_back([&] { result = load(model_, cache_); });
  for (std::thread& thread : threads) thread.join();
  for (const Loaded& result : loaded) {
    EXPECT_EQ(result.warnings, "");
    EXPECT_EQ(result.logits, loaded[0].logits);
  }
  expect_served(loaded[0].logits);
}

}  // namespace pack_cache_test
}  // namespace eadem::models
