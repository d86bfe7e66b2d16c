// SPDX-License-Identifier: Apache-2.0
//
// Tokenizer::encode of segments: nobody plants a special token in text that is not trusted, and borders of segments do
// not show in the ids.
#include <gtest/gtest.h>

#include <algorithm>

#include "eadem/io/json.h"
#include "eadem/io/template/chat_template.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::io {
namespace {

using Ids = std::vector<int32_t>;

JsonValue added(int64_t id, const char* content, bool special, bool normalized, bool single_word = false) {
  return JsonValue::object()
      .set("id", id)
      .set("content", content)
      .set("special", special)
      .set("normalized", normalized)
      .set("single_word", single_word)
      .set("lstrip", false)
      .set("rstrip", false);
}

// One token for each character of ASCII, "ab", and the added tokens of `list`, whose ids begin at 200.
Tokenizer small_tokenizer(JsonValue list, bool small_e) {
  JsonValue vocab = JsonValue::object();
  for (int c = 1; c < 128; ++c) vocab.set(std::string(1, static_cast<char>(c)), int64_t{c});
  vocab.set("ab", int64_t{150});
  JsonValue document = JsonValue::object();
  document.set("version", "1.0").set("added_tokens", std::move(list));
  if (small_e)
    document.set("normalizer", JsonValue::object()
                                   .set("type", "Replace")
                                   .set("pattern", JsonValue::object().set("String", "E"))
                                   .set("content", "e"));
  document.set("model", JsonValue::object()
                            .set("type", "BPE")
                            .set("vocab", std::move(vocab))
                            .set("merges", JsonValue::array().push_back("a b")));
  return Tokenizer::from_json(to_json(document), "", "small");
}

int64_t count(const Ids& ids, int32_t id) { return std::count(ids.begin(), ids.end(), id); }

TEST(Segments, AreJoinedBeforeMerging) {
  const Tokenizer tokenizer = small_tokenizer(JsonValue::array(), false);
  EXPECT_EQ(
      tokenizer.encode(std::vector<TextSegment>{{"xa", true}, {"b", false}, {"", true}, {"a", false}, {"b", true}}),
      (Ids{'x', 150, 150}));
  EXPECT_EQ(tokenizer.encode(std::vector<TextSegment>{}), Ids{});
}

TEST(Segments, SpecialTokensAreReadWhereTheyAreTrusted) {
  for (const bool normalized : {false, true}) {
    SCOPED_TRACE(normalized);
    JsonValue list = JsonValue::array();
    list.push_back(added(200, "<e>", true, normalized)).push_back(added(201, "x<e>", true, normalized));
    list.push_back(added(202, "<e>y", true, normalized)).push_back(added(203, "z<e", false, normalized));
    list.push_back(added(204, "nn", false, normalized)).push_back(added(205, "wo", true, normalized, true));
    const Tokenizer tokenizer = small_tokenizer(std::move(list), normalized);
    const auto ids = [&](const std::vector<TextSegment>& segments) { return tokenizer.encode(segments); };
    EXPECT_EQ(ids({{"<e>", true}}), (Ids{200}));
    EXPECT_EQ(ids({{"<e>", false}}), (Ids{'<', 'e', '>'}));
    EXPECT_EQ(ids({{"a<e>", false}, {"<e>", true}, {"<e>", false}}), (Ids{'a', '<', 'e', '>', 200, '<', 'e', '>'}));
    // Cut by a border, in every way.
    EXPECT_EQ(ids({{"<", true}, {"e>", false}}), (Ids{'<', 'e', '>'}));
    EXPECT_EQ(ids({{"<", true}, {"e", false}, {">", true}}), (Ids{'<', 'e', '>'}));
    EXPECT_EQ(ids({{"<e", false}, {">", true}}), (Ids{'<', 'e', '>'}));
    // Text before or after a trusted token cannot hide it in a longer one.
    EXPECT_EQ(ids({{"x", false}, {"<e>", true}}), (Ids{'x', 200}));
    EXPECT_EQ(ids({{"<e>", true}, {"y", false}}), (Ids{200, 'y'}));
    EXPECT_EQ(ids({{"z", false}, {"<e>", true}}), (Ids{'z', 200}));
    // Added tokens that are not special do cross borders, as if there were none.
    EXPECT_EQ(ids({{"n", false}, {"n", true}}), (Ids{204}));
    EXPECT_EQ(ids({{"nn", false}}), (Ids{204}));
    EXPECT_EQ(ids({{"wo", true}}), (Ids{205}));
    EXPECT_EQ(ids({{"a", false}, {"wo", true}, {"a", false}}), (Ids{'a', 205, 'a'}));
  }
}

TEST(Segments, NormalizationMakesNoSpecialToken) {
  JsonValue list = JsonValue::array();
  list.push_back(added(200, "<e>", true, true));
  const Tokenizer tokenizer = small_tokenizer(std::move(list), true);
  const auto ids = [&](const std::vector<TextSegment>& segments) { return tokenizer.encode(segments); };
  EXPECT_EQ(ids({{"<E>", true}}), (Ids{200}));
  EXPECT_EQ(ids({{"<E>", false}, {"<e>", true}, {"ab", false}}), (Ids{'<', 'e', '>', 200, 150}));
  EXPECT_EQ(ids({{"a", false}, {"b<E>a", true}, {"b", false}}), (Ids{150, 200, 150}));
}

// Old files of Llama 2 find </s> after a space only, which may belong to a message.
TEST(Segments, ASpaceOfAMessageStandsBeforeASpecialToken) {
  JsonValue list = JsonValue::array();
  list.push_back(added(200, "</s>", true, true));
  JsonValue vocab = JsonValue::object();
  for (int c = 1; c < 128; ++c) vocab.set(std::string(1, static_cast<char>(c)), int64_t{c});
  vocab.set("\xE2\x96\x81", int64_t{128});
  const auto step = [](const char* type) { return JsonValue::object().set("type", type); };
  JsonValue steps = JsonValue::array();
  steps.push_back(step("Prepend").set("prepend", "\xE2\x96\x81"));
  steps.push_back(
      step("Replace").set("pattern", JsonValue::object().set("String", " ")).set("content", "\xE2\x96\x81"));
  JsonValue document = JsonValue::object().set("version", "1.0").set("added_tokens", std::move(list));
  document.set("normalizer", step("Sequence").set("normalizers", std::move(steps)));
  document.set("model", step("BPE").set("vocab", std::move(vocab)).set("merges", JsonValue::array()));
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(document), "", "llama2");
  const auto ids = [&](const std::vector<TextSegment>& segments) { return tokenizer.encode(segments); };
  EXPECT_EQ(ids({{"a ", false}, {"</s>", true}, {"b", false}}), (Ids{128, 'a', 200, 'b'}));
  EXPECT_EQ(ids({{"a", false}, {" </s>", true}, {"b", false}}), (Ids{128, 'a', 200, 'b'}));
  EXPECT_EQ(ids({{"a", false}, {"</s>", true}}), tokenizer.encode("a</s>"));
  EXPECT_EQ(ids({{"a ", true}, {"</s>", false}}), (Ids{128, 'a', 128, 128, '<', '/', 's', '>'}));
  EXPECT_EQ(ids({{"a ", true}, {"</", false}, {"s>", true}}), (Ids{128, 'a', 128, 128, '<', '/', 128, 's', '>'}));
  // A planted one does not hide the one that the template wrote.
  EXPECT_EQ(count(ids({{" </s> ", false}, {"</s>", true}}), 200), 1);
}

TEST(Segments, ControlTokensAreReadWhereTheyAreTrusted) {
  for (const bool normalized : {false, true}) {
    SCOPED_TRACE(normalized);
    JsonValue list = JsonValue::array();
    list.push_back(added(200, "<t>", false, normalized)).push_back(added(201, "nn", false, normalized));
    const Tokenizer tokenizer = small_tokenizer(std::move(list), normalized);
    const int32_t control[] = {200};
    const auto ids = [&](const std::vector<TextSegment>& segments) {
      return tokenizer.encode(segments, {.control = control});
    };
    EXPECT_EQ(ids({{"<t>nn", true}}), (Ids{200, 201}));
    EXPECT_EQ(ids({{"<t>nn", false}}), (Ids{'<', 't', '>', 201}));
    EXPECT_EQ(ids({{"a<t>", false}, {"<t>a", true}, {"b", false}}),
              normalized ? (Ids{'a', '<', 't', '>', 200, 'a', 'b'}) : (Ids{'a', '<', 't', '>', 200, 150}));
    EXPECT_EQ(ids({{"<t", true}, {">", false}}), (Ids{'<', 't', '>'}));
    EXPECT_EQ(tokenizer.encode(std::vector<TextSegment>{{"<t>", false}}), (Ids{200}));
  }
}

// Plants `token` in every field of a conversation; the template writes all of them.
std::vector<TextSegment> planted(const std::string& token) {
  const ChatTemplate chat(
      "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.name }}{{ m.content | trim }}{{ m.reasoning }}"
      "{% for part in m.parts %}{{ part.text | replace('q', '') }}{% endfor %}{% for call in m.tool_calls %}"
      "{{ call | tojson }}{{ call.name ~ call.arguments }}{% endfor %}{{ m }}{% endfor %}{{ tools | tojson(indent=1) }}"
      "{{ extra[0:] }}{% set x %}{{ extra }}{% endset %}{{ x }}{{ [extra, extra] | join('-') }}",
      "planted");
  const std::string split = token.substr(0, 1) + "q" + token.substr(1);
  TemplateInput input;
  JsonValue call = JsonValue::object().set("name", token).set("arguments", JsonValue::object().set(token, token));
  JsonValue message = JsonValue::object();
  message.set("role", token).set("name", token).set("content", " " + token + " ").set("reasoning", "x" + token + "y");
  message.set("parts", JsonValue::array().push_back(JsonValue::object().set("text", split)));
  message.set("tool_calls", JsonValue::array().push_back(std::move(call)));
  input.variables.set("messages", JsonValue::array().push_back(std::move(message)));
  input.variables.set("tools", JsonValue::array().push_back(JsonValue::object().set("description", token)));
  input.variables.set("extra", token);
  return chat.render(input);
}

// `anywhere`: the tokenizer finds its special tokens wherever they stand. Llama 2's files ask for a space before them.
void expect_nothing_planted(const Tokenizer& tokenizer, bool anywhere = true) {
  int64_t specials = 0, tried = 0;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (!tokenizer.is_token(id) || !tokenizer.is_special(id)) continue;
    if (++specials > 300) break;
    const std::string token(tokenizer.token_text(id));
    const Ids ids = tokenizer.encode(planted(token), {.add_special_tokens = false});
    EXPECT_EQ(count(ids, id), 0) << tokenizer.source() << ": " << token;
    // The same text, all of it trusted, holds the token many times: the test reaches what it is about.
    tried += count(tokenizer.encode(join_segments(planted(token)), {.add_special_tokens = false}), id) > 8;
  }
  EXPECT_GT(specials, 0);
  if (anywhere) {
    EXPECT_EQ(tried, std::min<int64_t>(specials, 300)) << tokenizer.source();
  }
}

TEST(Segments, NoFieldOfAConversationPlantsASpecialToken) {
  for (const bool normalized : {false, true}) {
    JsonValue list = JsonValue::array();
    list.push_back(added(200, "<|im_end|>", true, normalized)).push_back(added(201, "</s>", true, normalized));
    list.push_back(added(202, "[INST]", true, normalized));
    expect_nothing_planted(small_tokenizer(std::move(list), false));
  }
}

TEST(Segments, NoFieldPlantsASpecialTokenOfRealTokenizers) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_nothing_planted(Tokenizer::from_file((shared_tokenizers() / "qwen2").string()));
  expect_nothing_planted(Tokenizer::from_file((shared_tokenizers() / "llama3/tokenizer.model").string()));
  expect_nothing_planted(Tokenizer::from_json(repaired_llama2_json(), "", "llama2"), false);
}

// Where nothing is planted, the segments have the ids of their joined text.
TEST(Segments, HaveTheIdsOfTheirText) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const std::string wiki = read_text(wiki_path()).substr(0, 200000);
  for (const std::string& name : {std::string("qwen2"), std::string("llama3/tokenizer.model"), std::string()}) {
    const Tokenizer tokenizer = name.empty() ? Tokenizer::from_json(repaired_llama2_json(), "", "llama2")
                                             : Tokenizer::from_file((shared_tokenizers() / name).string());
    int32_t last = -1;
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
      if (tokenizer.is_special(id)) last = id;
    }
    const std::string token(tokenizer.token_text(last));
    std::vector<TextSegment> segments;
    for (size_t pos = 0, i = 0; pos < wiki.size(); ++i) {
      size_t end = std::min(wiki.size(), pos + 1 + (i * 7919) % 97);
      while (end < wiki.size() && (static_cast<unsigned char>(wiki[end]) & 0xC0) == 0x80) ++end;
      segments.push_back({wiki.substr(pos, end - pos), i % 3 == 0});
      if (i % 5 == 0) segments.push_back({(i % 2 == 0 ? " " : "") + token, true});
      pos = end;
    }
    EXPECT_TRUE(tokenizer.encode(segments) == tokenizer.encode(join_segments(segments))) << name;
  }
}

}  // namespace
}  // namespace eadem::io
