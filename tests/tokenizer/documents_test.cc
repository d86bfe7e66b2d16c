// SPDX-License-Identifier: Apache-2.0
//
// tokenizer.json documents built as those of known models, against the Hugging Face `tokenizers` package: steps after
// ByteLevel (Falcon), several steps (StarCoder), matches of no character, and byte fallback without some bytes.
#include <gtest/gtest.h>

#include "eadem/core/error.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

TEST(Documents, EqualHuggingFace) {
  const JsonReader goldens = read_golden("documents.json");
  const auto texts = goldens.strings("texts");
  int num_documents = 0;
  for (const JsonReader& golden : goldens.elements("documents")) {
    const std::string name = golden.string("name");
    JsonValue document = JsonValue::object();
    document.set("model", *goldens.object("models").raw(golden.string("model")));
    for (const char* part : {"normalizer", "pre_tokenizer", "decoder"}) {
      if (const JsonValue* value = golden.raw(part)) document.set(part, *value);
    }
    const Tokenizer tokenizer = Tokenizer::from_json(to_json(document), "", name);
    const auto& all_ids = golden.raw("ids")->as_array();
    ASSERT_EQ(all_ids.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(texts[i]), ids_of(all_ids[i])) << name << ", text " << i << ": '" << texts[i] << "'";
    }
    ++num_documents;
  }
  EXPECT_GE(num_documents, 40);
}

// The library drops a character that has neither a token nor an unknown token; a lost character is an error here.
TEST(Documents, AHoleWithoutUnknownTokenIsRefused) {
  const JsonReader goldens = read_golden("documents.json");
  JsonValue model = *goldens.object("models").raw("holes False");
  model.set("unk_token", nullptr);
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(JsonValue::object().set("model", model)), "", "holes");
  EXPECT_NO_THROW(tokenizer.encode("\x01"));  // <0x01> is there
  try {
    tokenizer.encode(std::string(1, '\0'));
    ADD_FAILURE() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("character 00"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace eadem::io
