// SPDX-License-Identifier: Apache-2.0
//
// Unigram models and WordPiece with the steps around them against the Hugging Face `tokenizers` package, and
// SentencePiece's own files against SentencePiece.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/precompiled_map.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

std::string data_file(const std::string& name) {
  return std::string(EADEM_SOURCE_DIR) + "/tests/data/tokenizer/" + name;
}

JsonValue document_of(const JsonReader& goldens, const JsonReader& golden) {
  JsonValue document = JsonValue::object().set("model", *goldens.object("models").raw(golden.string("model")));
  for (const char* part : {"normalizer", "pre_tokenizer", "decoder", "post_processor"})
    if (const JsonValue* value = golden.raw(part)) document.set(part, *value);
  return document;
}

TEST(Models, EqualHuggingFace) {
  const JsonReader goldens = read_golden("models.json");
  const auto texts = goldens.strings("texts");
  int num_documents = 0;
  for (const JsonReader& golden : goldens.elements("documents")) {
    SCOPED_TRACE(golden.string("name"));
    const Tokenizer tokenizer = Tokenizer::from_json(to_json(document_of(goldens, golden)), "", "golden");
    const auto decoded = golden.strings("decoded");
    const auto& all_ids = golden.raw("ids")->as_array();
    ASSERT_EQ(all_ids.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(texts[i]), ids_of(all_ids[i])) << "text " << i << ": '" << texts[i] << "'";
      EXPECT_EQ(tokenizer.decode(ids_of(all_ids[i]), false), decoded[i]) << "text " << i << ": '" << texts[i] << "'";
    }
    ++num_documents;
  }
  EXPECT_GE(num_documents, 13);
}

TEST(Models, OfSentencePieceEqualThePackage) {
  const JsonReader goldens = read_golden("models.json");
  const auto texts = goldens.strings("texts");
  for (const JsonReader& golden : goldens.elements("sentencepiece")) {
    const std::string file = golden.string("file");
    SCOPED_TRACE(file);
    const Tokenizer tokenizer = Tokenizer::from_file(data_file(file));
    const auto& all_ids = golden.raw("ids")->as_array();
    const auto& decoded = golden.raw("decoded")->as_array();
    ASSERT_EQ(all_ids.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto expected = ids_of(all_ids[i]);
      EXPECT_EQ(tokenizer.encode(texts[i], {.add_special_tokens = false, .parse_special = false}), expected)
          << "text " << i << ": '" << texts[i] << "'";
      if (decoded[i].is_string()) {
        EXPECT_EQ(tokenizer.decode(expected), decoded[i].as_string()) << "text " << i << ": '" << texts[i] << "'";
      }
    }
    const auto id = [&](const char* key) {
      const int64_t value = golden.integer(key, -1, kMaxVocab);
      return value < 0 ? std::nullopt : std::optional(static_cast<int32_t>(value));
    };
    EXPECT_EQ(tokenizer.bos(), id("bos"));
    EXPECT_EQ(tokenizer.eos(), id("eos"));
    EXPECT_EQ(tokenizer.pad(), id("pad"));
    // BPE models are Llama's and its kin's, whose class puts BOS before a text.
    EXPECT_EQ(tokenizer.prefix_ids().size(), file.starts_with("spm_bpe") ? 1u : 0u);
  }
}

// The same model from a file of each kind, but for repeated spaces, which only SentencePiece's own drops.
TEST(Models, OfSentencePieceEqualTheirGguf) {
  const Tokenizer model = Tokenizer::from_file(std::string(EADEM_SOURCE_DIR) + "/tests/data/stories260K/tok512.model");
  const Tokenizer gguf = stories_tokenizer();
  EXPECT_EQ(model.vocab_size(), gguf.vocab_size());
  for (const char* text : {"Once upon a time, there was a girl.", "caf\xC3\xA9 \xE4\xBD\xA0", ""})
    EXPECT_EQ(model.encode(text), gguf.encode(text));
}

// Every cut and every changed byte of a file is refused, or makes a tokenizer that holds its contract.
TEST(Models, DamagedSentencePieceFilesAreRefusedOrHold) {
  const std::string whole = read_file(data_file("spm_unigram.model"), 1 << 20);
  int refused = 0;
  const auto check = [&](const std::string& content) {
    try {
      const Tokenizer tokenizer(spec_from_sentencepiece(content, "damaged.model"));
      const auto ids = tokenizer.encode("Once \xEF\xAC\x81 ab, upon");
      for (const int32_t id : ids) EXPECT_TRUE(tokenizer.is_token(id));
    } catch (const Error&) {
      ++refused;
    }
  };
  for (size_t end = 1; end < whole.size(); end += 7) check(whole.substr(0, end));
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ (at % 2 == 0 ? 0x80 : 0x1d));
    check(changed);
  }
  EXPECT_GT(refused, 100);
}

TEST(Models, WhatCannotBeReadIsNamed) {
  const auto refusal = [](const std::string& json) {
    try {
      Tokenizer::from_json(json, "", "t.json");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [&](const std::string& json, const std::string& words) {
    EXPECT_NE(refusal(json).find(words), std::string::npos) << refusal(json);
  };
  expect(R"({"model":{"type":"WordLevel","vocab":{}}})", "'WordLevel' is not supported; BPE, Unigram and WordPiece");
  expect(R"({"model":{"type":"Unigram","vocab":[["a",-1],["b"]]}})", "model.vocab[1]");
  expect(R"({"model":{"type":"Unigram","unk_id":2,"vocab":[["a",-1]]}})", "model.unk_id is 2");
  expect(R"({"model":{"type":"WordPiece","unk_token":"?","continuing_subword_prefix":"##",)"
         R"("max_input_chars_per_word":100,"vocab":{"a":0}}})",
         "model.unk_token");
  expect(R"({"normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"},)"
         R"("model":{"type":"Unigram","vocab":[["a",-1]]}})",
         "precompiled_charsmap of 3 bytes");
  EXPECT_THROW(Tokenizer::from_json(R"({"model":{"type":"Unigram","vocab":[["a",-1]]}})", "", "t").encode("b"),
               InvalidArgument);
}

TEST(Models, TruncationAndPaddingAreNoted) {
  const Tokenizer tokenizer = Tokenizer::from_json(
      R"({"truncation":{"direction":"Right","max_length":512,"strategy":"LongestFirst","stride":0},)"
      R"("padding":{"strategy":"BatchLongest","direction":"Right","pad_id":0,"pad_type_id":0,"pad_token":"a"},)"
      R"("model":{"type":"Unigram","vocab":[["a",-1]]}})",
      "", "t.json");
  ASSERT_EQ(tokenizer.notes().size(), 2u);
  EXPECT_EQ(tokenizer.notes()[0], "truncation to 512 tokens is not applied");
  EXPECT_EQ(tokenizer.notes()[1], "padding is not applied");
  EXPECT_EQ(tokenizer.encode(std::string(600, 'a')).size(), 600u);
}

}  // namespace
}  // namespace eadem::io
