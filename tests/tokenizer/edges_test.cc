// SPDX-License-Identifier: Apache-2.0
//
// Where pieces begin and added tokens end, against the Hugging Face `tokenizers` package: classes of characters, the
// beginning of a text that a normalizer drops, matches of no character, and white space that added tokens take from
// each other.
#include <gtest/gtest.h>

#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

TEST(Edges, EqualHuggingFace) {
  const JsonReader goldens = read_golden("edges.json");
  const auto texts = goldens.strings("texts");
  int num_documents = 0;
  for (const JsonReader& golden : goldens.elements("documents")) {
    JsonValue document = *golden.raw("parts");
    SCOPED_TRACE(to_compact_json(document));
    document.set("model", *goldens.raw("model"));
    const Tokenizer tokenizer = Tokenizer::from_json(to_json(document), "", "golden");
    const auto& all_ids = golden.raw("ids")->as_array();
    const auto decoded = golden.strings("decoded");
    ASSERT_EQ(all_ids.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(texts[i]), ids_of(all_ids[i])) << "text " << i << ": '" << texts[i] << "'";
      EXPECT_EQ(tokenizer.decode(ids_of(all_ids[i]), false), decoded[i]) << "text " << i << ": '" << texts[i] << "'";
    }
    ++num_documents;
  }
  EXPECT_GE(num_documents, 60);
}

// The library does not skip a special token whose normal form differs from its content.
TEST(Edges, SpecialTokensInNormalFormAreSkipped) {
  const Tokenizer tokenizer = Tokenizer::from_json(
      R"({"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"normalizer":{"type":"Lowercase"},
          "added_tokens":[{"id":1,"content":"<S>","special":true,"normalized":true}]})",
      "", "lowercase");
  const std::vector<int32_t> ids{0, 1};
  EXPECT_EQ(tokenizer.encode("a<S>"), ids);
  EXPECT_EQ(tokenizer.decode(ids, false), "a <s>");
  EXPECT_EQ(tokenizer.decode(ids, true), "a");
}

// Scanning the white space after every token anew would take hours.
TEST(Edges, StrippedWhiteSpaceIsLinearWork) {
  const Tokenizer tokenizer = Tokenizer::from_json(
      R"({"model":{"type":"BPE","vocab":{"a":0},"merges":[]},
          "added_tokens":[{"id":1,"content":" ","special":true,"rstrip":true}]})",
      "", "spaces");
  EXPECT_EQ(tokenizer.encode(std::string(1 << 20, ' ')).size(), size_t{1} << 20);
}

}  // namespace
}  // namespace eadem::io
