// SPDX-License-Identifier: Apache-2.0
//
// A model in several GGUF files computes, generates and converts as the one file that it was split from.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "eadem/convert/convert.h"
#include "eadem/engine/llm.h"
#include "eadem/io/files/mapped_file.h"
#include "tests/support/split_gguf.h"

namespace eadem::convert {
namespace split_files_test {

namespace fs = std::filesystem;

const std::string kWhole = std::string(EADEM_SOURCE_DIR) + "/tests/data/stories260K/stories260K.gguf";

class SplitFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_split_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    fs::create_directory(folder_ / "parts");
    parts_ = test::split_gguf(kWhole, (folder_ / "parts/stories").string(), 3);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::vector<float> logits_of(const std::string& path) {
    const auto engine = engine::InferEngine::from_checkpoint(
        models::open_checkpoint(path), open_device("cpu", {.num_threads = 1}), {.max_logit_rows = 8});
    engine->forward(
        {.input_ids = {1, 403, 407, 261, 378}, .input_lengths = {5}, .cache_lengths = {0}, .all_logits = true});
    const Tensor logits = engine->logits();
    const float* values = logits.view.as<float>();
    return {values, values + logits.view.num_elements()};
  }

  std::string converted(const std::string& path, const std::string& name, const std::string& type) const {
    const std::string out = (folder_ / name).string();
    convert_model(path, out, {.type = type, .threads = 1}, {});
    return io::read_file(fs::is_directory(out) ? out + "/model.safetensors" : out, 1 << 30);
  }

  fs::path folder_;
  std::vector<std::string> parts_;
};

TEST_F(SplitFiles, LogitsAndTextAreThoseOfTheWholeFile) {
  const std::vector<float> expected = logits_of(kWhole);
  engine::LLM whole(kWhole, open_device("cpu", {.num_threads = 1}), {});
  const std::string text = whole.generate({"Once upon a time"}, {.temperature = 0, .max_tokens = 40})[0].text;
  EXPECT_FALSE(text.empty());
  for (const std::string& path : {parts_[0], parts_[2], (folder_ / "parts").string()}) {
    SCOPED_TRACE(path);
    EXPECT_EQ(logits_of(path), expected);
    std::vector<std::pair<int64_t, int64_t>> progress;
    engine::LLM llm(path, open_device("cpu", {.num_threads = 1}), {}, Logger(),
                    [&](int64_t done, int64_t total) { progress.emplace_back(done, total); });
    EXPECT_EQ(llm.generate({"Once upon a time"}, {.temperature = 0, .max_tokens = 40})[0].text, text);
    // Progress counts the bytes of all parts.
    const auto file = io::GgufFile::open(kWhole);
    int64_t bytes = 0;
    for (const io::WeightInfo& info : file->tensors()) bytes += info.size_bytes;
    ASSERT_FALSE(progress.empty());
    EXPECT_EQ(progress.back(), std::pair(bytes, bytes));
  }
}

TEST_F(SplitFiles, AreConvertedAsTheWholeFile) {
  EXPECT_EQ(converted(parts_[1], "a.gguf", "as-is"), converted(kWhole, "b.gguf", "as-is"));
  EXPECT_EQ(converted(parts_[0], "c.gguf", "q8_0"), converted(kWhole, "d.gguf", "q8_0"));
  EXPECT_EQ(converted((folder_ / "parts").string(), "e", "bf16"), converted(kWhole, "f", "bf16"));
  EXPECT_EQ(io::read_file((folder_ / "e/tokenizer.json").string(), 1 << 26),
            io::read_file((folder_ / "f/tokenizer.json").string(), 1 << 26));
}

}  // namespace split_files_test
}  // namespace eadem::convert
