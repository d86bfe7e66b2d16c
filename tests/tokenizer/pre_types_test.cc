// SPDX-License-Identifier: Apache-2.0
//
// The pre-tokenizers that GGUF files name, against the Hugging Face `tokenizers` package with the patterns of the
// models' own files.
#include <gtest/gtest.h>

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/files/gguf_pre_types.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

TEST(PreTypes, EqualHuggingFace) {
  const JsonReader goldens = read_golden("pre_types.json");
  const auto texts = goldens.strings("texts");
  std::string tested;
  size_t num_tested = 0;
  for (const char* kind : {"byte_level", "metaspace"}) {
    for (const JsonReader& type : goldens.object(kind).elements("types")) {
      const auto& all_ids = type.raw("ids")->as_array();
      ASSERT_EQ(all_ids.size(), texts.size());
      for (const std::string& name : type.strings("names")) {
        const Tokenizer tokenizer = Tokenizer::from_gguf(small_gguf(goldens, kind, name));
        for (size_t i = 0; i < texts.size(); ++i) {
          const auto ids = tokenizer.encode(texts[i], {.add_special_tokens = false});
          EXPECT_EQ(ids, ids_of(all_ids[i])) << name << ", text " << i << ": '" << texts[i] << "'";
          if (std::string_view(kind) == "byte_level") {
            EXPECT_EQ(tokenizer.decode(ids), texts[i]) << name;
          }
        }
        ++num_tested;
        EXPECT_NE((", " + gguf_pre_type_names() + ",").find(", " + name + ","), std::string::npos) << name;
      }
    }
  }
  const std::string names = gguf_pre_type_names();
  EXPECT_EQ(num_tested, static_cast<size_t>(std::count(names.begin(), names.end(), ',')) + 1);
}

// The patterns of these have matchers written by hand, many times faster than the general engine.
TEST(PreTypes, CommonPatternsAreKnown) {
  for (const char* name : {"gpt-2", "llama-bpe", "qwen2"}) {
    EXPECT_TRUE(known_pattern(find_gguf_pre_type(name)->patterns.back())) << name;
  }
}

TEST(PreTypes, UnknownNamesAreRefusedWithTheList) {
  const JsonReader goldens = read_golden("pre_types.json");
  for (const auto& [name, word] : {std::pair("novelty", "'novelty'"), std::pair("", "is missing")}) {
    try {
      Tokenizer::from_gguf(small_gguf(goldens, "byte_level", name));
      ADD_FAILURE() << "accepted";
    } catch (const Unsupported& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(word), std::string::npos) << message;
      EXPECT_NE(message.find("deepseek-llm"), std::string::npos) << message;
    }
  }
}

// BOS where the type asks for it, unless the file says otherwise.
TEST(PreTypes, BosGoesByTypeAndFile) {
  const JsonReader goldens = read_golden("pre_types.json");
  for (const auto& [name, wanted] :
       {std::pair("llama-bpe", true), std::pair("tekken", true), std::pair("qwen2", false)}) {
    GgufTokenizerData data = small_gguf(goldens, "byte_level", name);
    data.bos = 5;
    EXPECT_EQ(Tokenizer::from_gguf(data).encode("").size(), wanted ? 1u : 0u) << name;
    data.add_bos = !wanted;
    EXPECT_EQ(Tokenizer::from_gguf(data).encode("").size(), wanted ? 0u : 1u) << name;
  }
}

TEST(PreTypes, Gemma4IsAModelOfItsOwn) {
  const JsonReader goldens = read_golden("pre_types.json");
  GgufTokenizerData data = small_gguf(goldens, "metaspace", "");
  data.model = "gemma4";
  const Tokenizer tokenizer = Tokenizer::from_gguf(data);
  const std::string text = "hello  world \xF0\x9F\xA6\x99\n";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

}  // namespace
}  // namespace eadem::io
