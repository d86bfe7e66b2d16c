// SPDX-License-Identifier: Apache-2.0
//
// Every component of tokenizer.json against the Hugging Face library (tests/data/tokenizer/make_goldens.py), and what
// is refused.
#include <gtest/gtest.h>

#include <functional>

#include "eadem/core/error.h"
#include "eadem/io/json.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {
namespace {

TEST(Pipeline, EqualsHuggingFace) {
  const JsonReader goldens = JsonReader::read(std::string(EADEM_SOURCE_DIR) + "/tests/data/tokenizer/pipelines.json");
  const auto texts = goldens.strings("texts");
  int num_pipelines = 0;
  for (const JsonReader& golden : goldens.elements("pipelines")) {
    const std::string name = golden.string("name");
    JsonValue model = *goldens.raw("model");
    model.set("fuse_unk", golden.boolean("fuse_unk"));
    JsonValue document = *golden.raw("parts");
    document.set("model", std::move(model));
    const Tokenizer tokenizer = Tokenizer::from_json(to_json(document), "", name);
    const auto& all_ids = golden.raw("ids")->as_array();
    const auto decoded = golden.strings("decoded");
    ASSERT_EQ(all_ids.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      std::vector<int32_t> expected;
      for (const JsonValue& id : all_ids[i].as_array()) expected.push_back(static_cast<int32_t>(id.as_integer()));
      EXPECT_EQ(tokenizer.encode(texts[i]), expected) << name << ": text " << i << " '" << texts[i] << "'";
      EXPECT_EQ(tokenizer.decode(expected), decoded[i]) << name << ": text " << i << " '" << texts[i] << "'";
    }
    ++num_pipelines;
  }
  EXPECT_GE(num_pipelines, 40);
}

// A byte-level tokenizer.json of the 256 bytes, with hooks to damage it.
JsonValue minimal() {
  JsonValue vocab = JsonValue::object();
  for (const char* text : {"a", "b", "c", "ab", "abc"}) vocab.set(text, static_cast<int64_t>(vocab.as_object().size()));
  return JsonValue::object()
      .set("version", "1.0")
      .set("model", JsonValue::object()
                        .set("type", "BPE")
                        .set("vocab", std::move(vocab))
                        .set("merges", JsonValue::array().push_back("a b").push_back(
                                           JsonValue::array().push_back("ab").push_back("c"))));
}

TEST(Pipeline, BothMergeFormsAndJoining) {
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(minimal()), "", "minimal");
  EXPECT_EQ(tokenizer.encode("abcab"), (std::vector<int32_t>{4, 3}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{4, 3}), "abc ab");
  EXPECT_EQ(tokenizer.vocab_size(), 5);
}

template <typename E>
void expect_refused(const std::function<void(JsonValue&)>& damage, const std::string& word) {
  JsonValue document = minimal();
  damage(document);
  try {
    Tokenizer::from_json(to_json(document), "", "bad.json");
    ADD_FAILURE() << "accepted; expected an error about " << word;
  } catch (const E& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("bad.json"), std::string::npos) << message;
    EXPECT_NE(message.find(word), std::string::npos) << message;
  }
}

JsonValue& model_of(JsonValue& document) { return const_cast<JsonValue&>(*document.find("model")); }
JsonValue typed(const char* type) { return JsonValue::object().set("type", type); }

TEST(Pipeline, RefusesByName) {
  using V = JsonValue;
  expect_refused<Unsupported>([](V& d) { model_of(d).set("type", "WordLevel"); }, "WordLevel");
  expect_refused<Unsupported>([](V& d) { model_of(d).set("dropout", 0.1); }, "dropout");
  expect_refused<Unsupported>([](V& d) { model_of(d).set("end_of_word_suffix", "</w>"); }, "end_of_word_suffix");
  expect_refused<Unsupported>([](V& d) { model_of(d).set("continuing_subword_prefix", "##"); }, "continuing_subword");
  expect_refused<Unsupported>([](V& d) { model_of(d).set("novelty", 1); }, "model.novelty");
  expect_refused<Unsupported>([](V& d) { d.set("version", "2.0"); }, "2.0");
  expect_refused<Unsupported>([](V& d) { d.set("surprise", 1); }, "surprise");
  expect_refused<Unsupported>([](V& d) { d.set("normalizer", typed("Nmt")); }, "Nmt");
  expect_refused<Unsupported>([](V& d) { d.set("normalizer", typed("NFC").set("strength", 3)); },
                              "normalizer.strength");
  expect_refused<Unsupported>([](V& d) { d.set("pre_tokenizer", typed("UnicodeScripts")); }, "UnicodeScripts");
  expect_refused<Unsupported>([](V& d) { d.set("decoder", typed("CTC")); }, "CTC");
  expect_refused<Unsupported>([](V& d) { d.set("post_processor", typed("PairProcessing")); }, "PairProcessing");
  expect_refused<Unsupported>(
      [](V& d) {
        d.set("pre_tokenizer", typed("Split")
                                   .set("pattern", V::object().set("Regex", "\\h\\w+"))
                                   .set("behavior", "Isolated")
                                   .set("invert", false));
      },
      "\\h");
  expect_refused<DataCorrupted>(
      [](V& d) {
        d.set("pre_tokenizer", typed("Split")
                                   .set("pattern", V::object().set("Regex", "(a"))
                                   .set("behavior", "Isolated")
                                   .set("invert", false));
      },
      "(a");
  expect_refused<DataCorrupted>([](V& d) { model_of(d).set("merges", V::array().push_back("a x")); }, "'x'");
  expect_refused<DataCorrupted>([](V& d) { model_of(d).set("merges", V::array().push_back("abc")); }, "'abc'");
  expect_refused<DataCorrupted>(
      [](V& d) { model_of(d).set("merges", V::array()).set("vocab", V::object().set("a", -1)); }, "-1");
  expect_refused<DataCorrupted>(
      [](V& d) { model_of(d).set("merges", V::array()).set("vocab", V::object().set("a", 1).set("b", 1)); }, "id 1");
  expect_refused<DataCorrupted>(
      [](V& d) { model_of(d).set("merges", V::array()).set("vocab", V::object().set("a", int64_t{1} << 40)); },
      "1099511627776");
  expect_refused<DataCorrupted>([](V& d) { model_of(d).set("unk_token", "?"); }, "unk_token");
  expect_refused<Unsupported>(
      [](V& d) {
        d.set("pre_tokenizer",
              typed("Sequence")
                  .set("pretokenizers", V::array()
                                            .push_back(typed("ByteLevel").set("add_prefix_space", false))
                                            .push_back(typed("Metaspace").set("replacement", "_"))));
      },
      "Metaspace after ByteLevel");
  const auto added = [](int id, const char* content) {
    return V::array().push_back(V::object().set("id", id).set("content", content).set("special", true));
  };
  expect_refused<DataCorrupted>([&](V& d) { d.set("added_tokens", added(7, "a")); }, "'a'");
  expect_refused<DataCorrupted>([&](V& d) { d.set("added_tokens", added(0, "x")); }, "id 0");
  expect_refused<DataCorrupted>([&](V& d) { d.set("added_tokens", added(9, "")); }, "empty");
}

TEST(Pipeline, UnknownCharactersAreRefusedWithoutUnkToken) {
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(minimal()), "", "minimal");
  EXPECT_THROW(tokenizer.encode("abx"), InvalidArgument);
}

TEST(Pipeline, TextThatIsNotUtf8NamesTheOffset) {
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(minimal()), "", "minimal");
  for (const std::string bad : {"ab\xFF", "ab\xC3", "ab\xED\xA0\x80", "ab\xC0\x80", "ab\xF4\x90\x80\x80"}) {
    try {
      tokenizer.encode(bad);
      ADD_FAILURE();
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("offset 2"), std::string::npos) << error.what();
    }
  }
}

TEST(Pipeline, ConfigRolesAndSwitches) {
  JsonValue document = minimal();
  document.set("added_tokens", JsonValue::array().push_back(
                                   JsonValue::object().set("id", 5).set("content", "<s>").set("special", true)));
  const std::string json = to_json(document);
  const auto load = [&](const std::string& config) { return Tokenizer::from_json(json, config, "x.json"); };
  EXPECT_EQ(load(R"({"bos_token": "<s>"})").encode("a"), (std::vector<int32_t>{0}));
  EXPECT_EQ(load(R"({"bos_token": {"content": "<s>"}, "add_bos_token": true})").encode("a"),
            (std::vector<int32_t>{5, 0}));
  EXPECT_EQ(load(R"({"eos_token": "<s>", "add_eos_token": true})").encode("a"), (std::vector<int32_t>{0, 5}));
  EXPECT_THROW(load(R"({"bos_token": "<bos>"})"), DataCorrupted);
  EXPECT_THROW(load(R"({"add_bos_token": true})"), DataCorrupted);
  EXPECT_EQ(load(R"({"chat_template": "T"})").chat_template(), "T");
  EXPECT_EQ(load(R"({"chat_template": [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]})")
                .chat_template(),
            "D");
}

// A decoder that makes a megabyte of every token would need as much for each.
TEST(Pipeline, ADecoderThatFillsTheMemoryIsRefused) {
  JsonValue document = minimal();
  JsonValue vocab = JsonValue::object();
  for (int i = 0; i < 2000; ++i) vocab.set("a" + std::to_string(i), i);
  model_of(document).set("vocab", std::move(vocab)).set("merges", JsonValue::array());
  document.set("decoder", typed("Replace")
                              .set("pattern", JsonValue::object().set("String", "a"))
                              .set("content", std::string(1 << 19, 'b')));
  try {
    Tokenizer::from_json(to_json(document), "", "evil.json");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("evil.json: decoder"), std::string::npos) << error.what();
  }
}

TEST(Pipeline, EncodingIsCancelled) {
  const std::atomic<bool> cancel = true;
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(minimal()), "", "minimal");
  const std::string text(100000, 'a');
  EXPECT_THROW(tokenizer.encode(text, {.cancel = &cancel}), Cancelled);
}

// A hundred thousand added tokens: finding each among all before it would take minutes.
TEST(Pipeline, ManyAddedTokensTakeLinearTime) {
  std::string config = R"({"added_tokens_decoder": {)";
  constexpr int kTokens = 100'000;
  for (int i = 0; i < kTokens; ++i) {
    config += fmt::format(R"({}"{}": {{"content": "<{}>", "special": true}})", i > 0 ? "," : "", 100 + i, i);
  }
  const Tokenizer tokenizer = Tokenizer::from_json(to_json(minimal()), config + "}}", "many.json");
  EXPECT_EQ(tokenizer.encode("ab<7>c<99999>"), (std::vector<int32_t>{3, 107, 2, 100099}));
}

TEST(Pipeline, TemplatesNameTheirTokens) {
  expect_refused<DataCorrupted>(
      [](JsonValue& d) {
        d.set("post_processor",
              typed("TemplateProcessing")
                  .set("single", JsonValue::array().push_back(JsonValue::object().set(
                                     "SpecialToken", JsonValue::object().set("id", "<s>").set("type_id", 0))))
                  .set("special_tokens", JsonValue::object()));
      },
      "<s>");
}

TEST(Pipeline, MissingFiles) { EXPECT_THROW(Tokenizer::from_file("/nonexistent/tokenizer.json"), NotFound); }

}  // namespace
}  // namespace eadem::io
