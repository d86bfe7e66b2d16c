// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>

#include "eadem/core/error.h"
#include "eadem/io/gguf.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "eadem/io/tokenizer/unicode.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::io {
namespace {

void expect_same_as_decode(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  for (const bool skip_special : {true, false}) {
    IncrementalDecoder decoder(tokenizer, skip_special);
    std::string text;
    for (const int32_t id : ids) {
      const std::string part = decoder.next(id);
      EXPECT_EQ(find_invalid_utf8(part), std::string::npos);
      text += part;
    }
    text += decoder.finish();
    EXPECT_EQ(text, tokenizer.decode(ids, skip_special));
    EXPECT_EQ(decoder.finish(), "");
  }
}

class Incremental : public testing::Test {
 protected:
  static std::vector<Tokenizer> load_all() {
    const std::string folder = shared_tokenizers().string();
    std::vector<Tokenizer> all;
    all.push_back(Tokenizer::from_file(folder + "/qwen2"));
    all.push_back(tokenizer_from_gguf(*GgufFile::open(folder + "/ggml-vocab/ggml-vocab-llama-spm.gguf")));
    return all;
  }
};

TEST_F(Incremental, EqualsDecode) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const std::string wiki = read_text(wiki_path()).substr(0, 20000);
  for (const Tokenizer& tokenizer : load_all()) {
    expect_same_as_decode(tokenizer, tokenizer.encode(wiki));
    expect_same_as_decode(tokenizer, tokenizer.encode(" \xF0\x9F\xA6\x99\xF0\x9F\xA6\x99 \xE2\x80\x8D\xC3\xA9"));
    expect_same_as_decode(tokenizer, {});
    // Any ids, well-formed together or not.
    std::mt19937 random(11);
    for (int i = 0; i < 300; ++i) {
      std::vector<int32_t> ids;
      while (ids.size() < 20) {
        const auto id =
            static_cast<int32_t>(random() % (random() % 2 ? 400 : static_cast<unsigned>(tokenizer.vocab_size())));
        if (tokenizer.is_token(id)) ids.push_back(id);
      }
      expect_same_as_decode(tokenizer, ids);
    }
  }
}

TEST_F(Incremental, HoldsBackOnlyUnfinishedCharacters) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const std::string hwair = "\xF0\x90\x8D\x88";
  for (const Tokenizer& tokenizer : load_all()) {
    const auto ids = tokenizer.encode("x" + hwair, {.add_special_tokens = false});
    IncrementalDecoder decoder(tokenizer);
    std::vector<std::string> parts;
    for (const int32_t id : ids) parts.push_back(decoder.next(id));
    EXPECT_EQ(parts.front(), "x");
    EXPECT_EQ(parts.back(), hwair);
    EXPECT_EQ(decoder.finish(), "");
    // Cut inside the character: one replacement at the end, and a fresh start after it.
    for (size_t i = 0; i + 1 < ids.size(); ++i) decoder.next(ids[i]);
    EXPECT_EQ(decoder.finish(), "\xEF\xBF\xBD");
    EXPECT_EQ(decoder.next(ids.front()), "x");
  }
}

// Only the first space of a text is the tokenizer's own: a continuation keeps its spaces.
TEST_F(Incremental, ContinuationKeepsItsSpaces) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const Tokenizer tokenizer = std::move(load_all()[1]);
  const auto ids = tokenizer.encode("Once upon a time");
  IncrementalDecoder decoder(tokenizer);
  std::string prompt, rest;
  for (size_t i = 0; i < ids.size(); ++i) (i < 2 ? prompt : rest) += decoder.next(ids[i]);
  EXPECT_EQ(prompt, "Once");
  EXPECT_EQ(rest, " upon a time");
}

TEST_F(Incremental, RefusesIdsThatAreNoTokens) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  for (const Tokenizer& tokenizer : load_all()) {
    for (const int32_t id : {-1, tokenizer.vocab_size(), INT32_MAX, INT32_MIN}) {
      EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{id}), InvalidArgument) << id;
      EXPECT_FALSE(tokenizer.is_token(id));
    }
  }
}

}  // namespace
}  // namespace eadem::io
