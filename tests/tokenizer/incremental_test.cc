// SPDX-License-Identifier: Apache-2.0
//
// Decoding token by token. The oracle is Python's incremental decoder of UTF-8 (make_small_goldens.py):
// Tokenizer::decode is no oracle, since it is built on IncrementalDecoder.
#include <gtest/gtest.h>

#include "eadem/core/error.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

std::vector<Tokenizer> small_tokenizers() {
  const JsonReader goldens = read_golden("pre_types.json");
  std::vector<Tokenizer> all;
  all.push_back(Tokenizer::from_gguf(small_gguf(goldens, "byte_level", "gpt-2")));
  all.push_back(Tokenizer::from_gguf(small_gguf(goldens, "metaspace", "gemma4")));
  all.push_back(stories_tokenizer());
  return all;
}

// Every token gives the text that it completes, no more and no less, also where bytes are not UTF-8 together.
TEST(Incremental, EveryStepEqualsPythons) {
  const JsonReader goldens = read_golden("incremental.json");
  const std::vector<Tokenizer> tokenizers = small_tokenizers();
  int num_cases = 0;
  for (const auto& [kind, tokenizer] :
       {std::pair("byte_level", &tokenizers[0]), std::pair("metaspace", &tokenizers[1])}) {
    IncrementalDecoder decoder(*tokenizer);  // finish() makes it as new
    for (const JsonReader& golden : goldens.elements(kind)) {
      const auto ids = ids_of(*golden.raw("ids"));
      const auto parts = golden.strings("parts");
      ASSERT_EQ(ids.size(), parts.size());
      std::string whole;
      for (size_t i = 0; i < ids.size(); ++i) {
        EXPECT_EQ(decoder.next(ids[i]), parts[i]) << kind << " case " << num_cases << ", step " << i;
        whole += parts[i];
      }
      whole += golden.string("rest");
      EXPECT_EQ(decoder.finish(), golden.string("rest")) << kind << " case " << num_cases;
      EXPECT_EQ(decoder.finish(), "");
      EXPECT_EQ(tokenizer->decode(ids), whole) << kind << " case " << num_cases;
      ++num_cases;
    }
  }
  EXPECT_GE(num_cases, 300);
}

TEST(Incremental, HoldsBackOnlyUnfinishedCharacters) {
  const std::string hwair = "\xF0\x90\x8D\x88";
  for (const Tokenizer& tokenizer : small_tokenizers()) {
    const auto ids = tokenizer.encode("x" + hwair, {.add_special_tokens = false});
    ASSERT_GE(ids.size(), 5u);
    IncrementalDecoder decoder(tokenizer);
    std::string before;
    for (size_t i = 0; i + 1 < ids.size(); ++i) before += decoder.next(ids[i]);
    EXPECT_EQ(before, "x");
    EXPECT_EQ(decoder.next(ids.back()), hwair);
    EXPECT_EQ(decoder.finish(), "");
    // Cut inside the character: one replacement at the end, and a fresh start after it.
    for (size_t i = 0; i + 1 < ids.size(); ++i) decoder.next(ids[i]);
    EXPECT_EQ(decoder.finish(), "\xEF\xBF\xBD");
    std::string again;
    for (const int32_t id : ids) again += decoder.next(id);
    EXPECT_EQ(again, "x" + hwair);
  }
}

// Only the first space of a text is the tokenizer's own: a continuation keeps its spaces.
TEST(Incremental, ContinuationKeepsItsSpaces) {
  const Tokenizer tokenizer = stories_tokenizer();
  const auto ids = tokenizer.encode("Once upon a time");
  IncrementalDecoder decoder(tokenizer);
  std::string prompt, rest;
  for (size_t i = 0; i < ids.size(); ++i) (i < 2 ? prompt : rest) += decoder.next(ids[i]);
  EXPECT_EQ(prompt, "Once");
  EXPECT_EQ(rest, " upon a time");
}

TEST(Incremental, SkipsSpecialTokensWhenAsked) {
  const Tokenizer tokenizer = stories_tokenizer();
  const auto ids = tokenizer.encode("<s> hi</s>", {.add_special_tokens = false});
  EXPECT_EQ(ids.front(), 1);
  EXPECT_EQ(ids.back(), 2);
  for (const bool skip : {false, true}) {
    IncrementalDecoder decoder(tokenizer, skip);
    std::string text;
    for (const int32_t id : ids) text += decoder.next(id);
    EXPECT_EQ(text.find("<s>") == std::string::npos, skip) << text;
    EXPECT_EQ(text.find("</s>") == std::string::npos, skip) << text;
  }
}

TEST(Incremental, RefusesIdsThatAreNoTokens) {
  for (const Tokenizer& tokenizer : small_tokenizers()) {
    for (const int32_t id : {-1, tokenizer.vocab_size(), INT32_MAX, INT32_MIN}) {
      EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{id}), InvalidArgument) << id;
      EXPECT_FALSE(tokenizer.is_token(id));
    }
  }
}

}  // namespace
}  // namespace eadem::io
