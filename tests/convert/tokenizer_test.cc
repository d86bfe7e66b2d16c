// SPDX-License-Identifier: Apache-2.0
//
// Which pre-tokenizer a GGUF file names for a tokenizer.json, whose steps may be others that cut texts alike.
#include "eadem/convert/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/files/gguf_pre_types.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::convert {
namespace tokenizer_test {

namespace fs = std::filesystem;

class GgufTokenizers : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_tokenizer_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The small byte-level vocabulary, cut as the GGUF name says.
  static io::TokenizerSpec spec_of(const std::string& name) {
    return io::spec_from_gguf(io::small_gguf(io::read_golden("pre_types.json"), "byte_level", name));
  }
  // The name that the GGUF form of a tokenizer.json has.
  std::string pre_of(const std::string& json) {
    std::ofstream(folder_ / "tokenizer.json") << json;
    notes_.clear();
    const auto vocab = static_cast<int64_t>(spec_of("gpt-2").vocab.size());
    for (const auto& [key, value] :
         gguf_tokenizer_of(folder_.string(), vocab, [&](const std::string& note) { notes_.push_back(note); }))
      if (key == "tokenizer.ggml.pre") return std::get<std::string>(value.data);
    return {};
  }
  // A tokenizer.json with these steps in place of its own.
  static std::string with(const std::string& part, const std::string& steps) {
    std::string json = io::to_tokenizer_json(spec_of("gpt-2"));
    const size_t begin = json.find("\"" + part + "\":");
    const size_t end = json.find(part == "normalizer" ? "\"pre_tokenizer\":" : "\"post_processor\":", begin);
    return json.replace(begin, end - begin, "\"" + part + "\": " + steps + ", ");
  }

  fs::path folder_;
  std::vector<std::string> notes_;
};

// The patterns of bailingmoe are qwen2's, written with possessive repetitions.
TEST_F(GgufTokenizers, EveryNameIsFoundAgainOrOneThatCutsAlike) {
  for (const io::GgufPreType& type : io::gguf_pre_types()) {
    if (!type.byte_level) continue;
    const std::string name(type.name);
    const io::GgufPreType* found = io::find_gguf_pre_type(pre_of(io::to_tokenizer_json(spec_of(name))));
    ASSERT_NE(found, nullptr) << name;
    const bool as_bailingmoe = std::ranges::equal(type.patterns, io::find_gguf_pre_type("bailingmoe")->patterns);
    const io::GgufPreType& alike = as_bailingmoe ? *io::find_gguf_pre_type("qwen2") : type;
    EXPECT_TRUE(std::ranges::equal(found->patterns, alike.patterns)) << name << " became " << found->name;
    EXPECT_EQ(found->ignore_merges, type.ignore_merges) << name << " became " << found->name;
  }
}

TEST_F(GgufTokenizers, OtherStepsThatCutAlikeHaveTheName) {
  EXPECT_EQ(pre_of(with("pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [
      {"type": "Digits", "individual_digits": true},
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]})")),
            "starcoder");
}

TEST_F(GgufTokenizers, WhatNoNameCutsAsIsRefused) {
  try {
    pre_of(with("pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]})"));
    ADD_FAILURE() << "accepted";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("GGUF has a name for"), std::string::npos) << error.what();
  }
}

TEST_F(GgufTokenizers, NfcIsLeftOutWithANote) {
  EXPECT_EQ(pre_of(with("normalizer", R"({"type": "NFC"})")), "gpt-2");
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_NE(notes_[0].find("NFC"), std::string::npos) << notes_[0];
}

}  // namespace tokenizer_test
}  // namespace eadem::convert
