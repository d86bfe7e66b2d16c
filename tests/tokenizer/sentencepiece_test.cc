// SPDX-License-Identifier: Apache-2.0
//
// A SentencePiece vocabulary in GGUF against SentencePiece itself with the file that it was made from.
#include <gtest/gtest.h>

#include "eadem/io/gguf.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

TEST(SentencePiece, EqualsThePackage) {
  const Tokenizer tokenizer = stories_tokenizer();
  const JsonReader goldens = read_golden("sentencepiece.json");
  const auto texts = goldens.strings("texts"), decoded = goldens.strings("decoded");
  const auto& all_ids = goldens.raw("ids")->as_array();
  ASSERT_EQ(all_ids.size(), texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto expected = ids_of(all_ids[i]);
    // SentencePiece reads no special tokens from a text.
    EXPECT_EQ(tokenizer.encode(texts[i], {.add_special_tokens = false, .parse_special = false}), expected) << texts[i];
    EXPECT_EQ(tokenizer.decode(expected), decoded[i]) << texts[i];
  }
}

}  // namespace
}  // namespace eadem::io
