// SPDX-License-Identifier: Apache-2.0
//
// Which pre-tokenizer a GGUF file names for a tokenizer.json, whose steps may be others that cut texts alike.
#include "eadem/convert/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

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
  std::string pre_of(const std::string& json, const std::string& model = "model") {
    std::ofstream(folder_ / "tokenizer.json") << json;
    notes_.clear();
    const auto vocab = static_cast<int64_t>(spec_of("gpt-2").vocab.size()) + num_added_;
    for (const auto& [key, value] :
         gguf_tokenizer_of(folder_.string(), model, vocab, [&](const std::string& note) { notes_.push_back(note); }))
      if (key == "tokenizer.ggml.pre") return std::get<std::string>(value.data);
    return {};
  }
  // The keys for the files of the folder.
  std::map<std::string, io::GgufValue> keys_of(int64_t vocab) {
    const io::GgufMetadata metadata =
        gguf_tokenizer_of(folder_.string(), "model", vocab, [&](const std::string& note) { notes_.push_back(note); });
    return {metadata.begin(), metadata.end()};
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
  int64_t num_added_ = 0;  // tokens beyond the small vocabulary
};

// The patterns of bailingmoe are qwen2's, written with possessive repetitions.
TEST_F(GgufTokenizers, EveryNameIsFoundAgainOrOneThatCutsAlike) {
  std::set<std::pair<const std::string_view*, bool>> seen;
  for (const io::GgufPreType& type : io::gguf_pre_types()) {
    // Names of the same patterns are one case.
    if (!type.byte_level || !seen.emplace(type.patterns.data(), type.ignore_merges).second) continue;
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

TEST_F(GgufTokenizers, PiecesOfSentencePieceAreWrittenAsTheyAre) {
  const fs::path models = fs::path(EADEM_SOURCE_DIR) / "tests/data/tokenizer";
  for (const auto& [file, model] : {std::pair("spm_bpe.model", "llama"), {"spm_unigram.model", "t5"}}) {
    fs::copy_file(models / file, folder_ / "tokenizer.model", fs::copy_options::overwrite_existing);
    const int64_t pieces = io::Tokenizer::from_file((models / file).string()).vocab_size();
    const auto keys = keys_of(pieces + 2);
    EXPECT_EQ(keys.at("tokenizer.ggml.model"), io::GgufValue::string(model));
    const auto& tokens = std::get<io::GgufArray>(keys.at("tokenizer.ggml.tokens").data).strings;
    ASSERT_EQ(std::ssize(tokens), pieces + 2) << file;
    EXPECT_EQ(tokens.back(), fmt::format("[PAD{}]", pieces + 1));
    EXPECT_THROW(keys_of(pieces - 1), DataCorrupted) << file;
  }
  // A GGUF file has no normalizer that leaves symbols of the user alone.
  fs::copy_file(models / "spm_bpe_symbols.model", folder_ / "tokenizer.model", fs::copy_options::overwrite_existing);
  EXPECT_THROW(keys_of(1000), Unsupported);
}

TEST_F(GgufTokenizers, VocabAndMergesAreWritten) {
  std::ofstream(folder_ / "vocab.json") << R"({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3})";
  std::ofstream(folder_ / "merges.txt") << "#version: 0.2\na b\n";
  std::ofstream(folder_ / "tokenizer_config.json") << R"({"tokenizer_class": "GPT2Tokenizer"})";
  const auto keys = keys_of(4);
  EXPECT_EQ(keys.at("tokenizer.ggml.pre"), io::GgufValue::string("gpt-2"));
  EXPECT_EQ(std::get<io::GgufArray>(keys.at("tokenizer.ggml.merges").data).strings, (std::vector<std::string>{"a b"}));
}

// llama.cpp knows by the name of Phi-3 that its special tokens take the white space behind them.
TEST_F(GgufTokenizers, TokensThatTakeSpaceBehindThemAreThoseOfPhi3) {
  io::TokenizerSpec spec = spec_of("gpt-2");
  for (const char* token : {"<|user|>", "<|endoftext|>"}) {
    io::AddedToken added;
    added.id = static_cast<int32_t>(spec.vocab.size());
    added.content = token;
    added.special = true;
    added.rstrip = added.content == "<|user|>";
    spec.vocab.push_back({added.content, added.id});
    spec.added_tokens.push_back(added);
  }
  num_added_ = 2;
  const std::string json = io::to_tokenizer_json(spec);
  EXPECT_EQ(pre_of(json, "Phi-3-mini"), "gpt-2");
  EXPECT_THROW(pre_of(json, "other"), Unsupported);

  io::GgufTokenizerData data = io::small_gguf(io::read_golden("pre_types.json"), "byte_level", "gpt-2");
  for (const char* token : {"<|user|>", "<|endoftext|>"}) data.tokens.push_back(token);
  data.token_types.assign(data.tokens.size(), static_cast<int32_t>(io::GgufTokenType::kNormal));
  data.token_types.end()[-1] = data.token_types.end()[-2] = static_cast<int32_t>(io::GgufTokenType::kControl);
  for (const auto& [name, taken] : {std::pair("My phi3 model", true), {"other", false}}) {
    data.name = name;
    const io::Tokenizer tokenizer = io::Tokenizer::from_gguf(data);
    EXPECT_EQ(tokenizer.encode("<|user|>\n a") == tokenizer.encode("<|user|>a"), taken) << name;
    EXPECT_NE(tokenizer.encode("<|endoftext|>\n a"), tokenizer.encode("<|endoftext|>a")) << name;
  }
}

TEST_F(GgufTokenizers, NfcIsLeftOutWithANote) {
  EXPECT_EQ(pre_of(with("normalizer", R"({"type": "NFC"})")), "gpt-2");
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_NE(notes_[0].find("NFC"), std::string::npos) << notes_[0];
}

}  // namespace tokenizer_test
}  // namespace eadem::convert
