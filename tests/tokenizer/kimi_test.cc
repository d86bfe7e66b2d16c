// SPDX-License-Identifier: Apache-2.0
//
// The rank files of Kimi against the `tiktoken` package (tests/data/tokenizer/make_kimi_goldens.py), and files that are
// refused.
#include <fmt/format.h>

#include "eadem/io/files/sha256.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "tests/support/refusal.h"
#include "tests/tokenizer/shared_tokenizers.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = fs::path(EADEM_SOURCE_DIR) / "tests/data/tokenizer/kimi";

constexpr const char* kConfig =
    R"({"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"}})";

TEST(Kimi, EqualsTiktoken) {
  const JsonReader goldens = read_golden("kimi.json");
  const Tokenizer tokenizer = Tokenizer::from_file(kFolder.string());
  const auto texts = goldens.strings("texts");
  const auto &ids = goldens.raw("ids")->as_array(), &plain_ids = goldens.raw("plain_ids")->as_array();
  ASSERT_EQ(texts.size(), ids.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(tokenizer.encode(texts[i]), ids_of(ids[i])) << "text " << i << ": '" << texts[i] << "'";
    EXPECT_EQ(tokenizer.encode(texts[i], {.parse_special = false, .control = tokenizer.added_ids()}),
              ids_of(plain_ids[i]))
        << "text " << i << ": '" << texts[i] << "'";
    EXPECT_EQ(tokenizer.decode(ids_of(ids[i]), false), texts[i]) << i;
  }
}

// The ranks of Llama 3 in the place of Kimi's: both are vocabularies of the same size.
TEST(Kimi, EqualsTiktokenWithManyRanks) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const TemporaryDirectory folder;
  fs::copy_file(shared_tokenizers() / "llama3/tokenizer.model", folder.path() / "tiktoken.model");
  write_text(folder.path() / "tokenizer_config.json", kConfig);
  const Tokenizer tokenizer = Tokenizer::from_file(folder.path().string());
  EXPECT_EQ(tokenizer.vocab_size(), 128256);
  EXPECT_EQ(tokenizer.token_text(128255), "<|reserved_token_128255|>");
  const JsonReader goldens = read_golden("kimi.json");
  const auto texts = goldens.strings("texts");
  const auto& ids = goldens.raw("large_ids")->as_array();
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(tokenizer.encode(texts[i], {.parse_special = false}), ids_of(ids[i])) << texts[i];
  }
  const auto wiki = tokenizer.encode(read_text(wiki_path()));
  EXPECT_EQ(static_cast<int64_t>(wiki.size()), goldens.integer("wiki_count", 0));
  std::string packed;
  for (const int32_t id : wiki) {
    for (int shift = 0; shift < 32; shift += 8) packed.push_back(static_cast<char>(id >> shift & 0xFF));
  }
  EXPECT_EQ(sha256_hex(packed), goldens.string("wiki_sha256"));
}

TEST(Kimi, RolesAndNames) {
  const Tokenizer tokenizer = Tokenizer::from_file((kFolder / "tiktoken.model").string());
  EXPECT_EQ(tokenizer.vocab_size(), 1156);
  EXPECT_EQ(tokenizer.bos(), 900);
  EXPECT_EQ(tokenizer.eos(), 901);
  EXPECT_EQ(tokenizer.unk(), 1154);
  EXPECT_EQ(tokenizer.pad(), 1155);
  EXPECT_EQ(tokenizer.token_text(905), "<|reserved_token_905|>");
  EXPECT_TRUE(tokenizer.is_special(905));
  EXPECT_FALSE(tokenizer.is_special(913));  // the config says so
  EXPECT_TRUE(tokenizer.encode("").empty());
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("<|im_user|>hi<|tool_call_begin|><|im_end|>")), "hi<|tool_call_begin|>");
  EXPECT_NE(tokenizer.chat_template().find("<|im_middle|>"), std::string::npos);
  std::vector<std::string> names;
  for (const TokenizerFile& file : tokenizer_files(kFolder.string())) names.push_back(file.name);
  EXPECT_EQ(names, (std::vector<std::string>{"tokenizer_config.json", "tiktoken.model"}));
  EXPECT_EQ(tokenizer_files((kFolder / "tiktoken.model").string())[0].name, "tiktoken.model");
}

// A special token's text is its own, whatever alphabet the ranks are spelt in.
TEST(Kimi, SpecialTokensMayHaveAnyText) {
  const TemporaryDirectory folder;
  write_text(folder.path() / "tiktoken.model", "YQ== 0\n");
  write_text(folder.path() / "tokenizer_config.json",
             R"({"added_tokens_decoder": {"1": {"content": "\u00e9 \u4f60", "special": true}},)" +
                 std::string(kConfig).substr(1));
  const Tokenizer tokenizer = Tokenizer::from_file(folder.path().string());
  const std::string text =
      "a\xC3\xA9 \xE4\xBD\xA0"
      "a";
  EXPECT_EQ(tokenizer.encode(text), (std::vector<int32_t>{0, 1, 0}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text), false), text);
}

std::string refusal_of(const std::string& ranks, const std::string& config) {
  const TemporaryDirectory folder;
  write_text(folder.path() / "tiktoken.model", ranks);
  if (!config.empty()) write_text(folder.path() / "tokenizer_config.json", config);
  return test::refusal([&] { Tokenizer::from_file(folder.path().string()); });
}

void expect_refused(const std::string& kind, const std::string& ranks, const std::string& config,
                    const std::vector<std::string>& words) {
  const std::string message = refusal_of(ranks, config);
  EXPECT_HAS(message, kind + ": ");
  EXPECT_HAS(message, "tiktoken.model: ");
  for (const std::string& word : words) EXPECT_HAS(message, word);
  EXPECT_LT(message.size(), 1000u);
}

TEST(Kimi, DamagedRanksAreRefused) {
  expect_refused("DataCorrupted", "", kConfig, {"no line has a rank"});
  expect_refused("DataCorrupted", "\n\n", kConfig, {"no line has a rank"});
  expect_refused("DataCorrupted", "YQ== 0\nY?== 1\n", kConfig, {"line 2 is not 'base64 rank': 'Y?== 1'"});
  expect_refused("DataCorrupted", "YQ== 0\nYQ= 1\n", kConfig, {"line 2 is not 'base64 rank'"});
  expect_refused("DataCorrupted", "YQ== 0\n 1\n", kConfig, {"line 2 is not 'base64 rank': ' 1'"});
  expect_refused("DataCorrupted", "YQ==0\n", kConfig, {"line 1 is not 'base64 rank': 'YQ==0'"});
  expect_refused("DataCorrupted", "YQ== -1\n", kConfig, {"line 1 is not 'base64 rank': 'YQ== -1'"});
  expect_refused("DataCorrupted", "YQ== 99999999999\n", kConfig, {"line 1 is not 'base64 rank'"});
  expect_refused("DataCorrupted", "YQ== 0\n\nYg== 2\n", kConfig, {"line 3 has rank 2; expected 1"});
  expect_refused("DataCorrupted", "YQ== 0\nYg== 1\n\nYQ== 2\n", kConfig,
                 {"line 4 gives rank 2 to the token 'a', which line 1 has"});
  expect_refused("DataCorrupted", std::string(1 << 20, 'A') + "\n", kConfig, {"line 1 is not 'base64 rank'", "bytes)"});
}

TEST(Kimi, OtherClassesAreRefused) {
  const auto with_class = [](const std::string& map) {
    return R"({"tokenizer_class": "TikTokenTokenizer", "auto_map": )" + map + "}";
  };
  const std::string known = "tokenization_kimi.TikTokenTokenizer or tokenization_moonshot.TikTokenTokenizer";
  expect_refused("Unsupported", "YQ== 0\n", "", {"1 tiktoken ranks", known, "names no class"});
  expect_refused("Unsupported", "YQ== 0\n", "{}", {"names no class"});
  for (const char* map : {"null", "{}", R"({"AutoTokenizer": null})", R"({"AutoTokenizer": []})",
                          R"({"AutoTokenizer": [null, "a.B"]})", R"({"AutoTokenizer": [3]})"}) {
    expect_refused("Unsupported", "YQ== 0\n", with_class(map), {"names no class"});
  }
  expect_refused("Unsupported", "YQ== 0\n", with_class(R"({"AutoTokenizer": ["tokenization_x.Y", null]})"),
                 {"it names 'tokenization_x.Y'"});
}

TEST(Kimi, ClassesAreKnownByEverySpelling) {
  for (const char* name : {"tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer",
                           "moonshotai/Kimi-K2-Instruct--tokenization_kimi.TikTokenTokenizer"}) {
    const TemporaryDirectory folder;
    write_text(folder.path() / "tiktoken.model", "YQ== 0\r\nYg== 1\r\nYWI= 2");
    write_text(folder.path() / "tokenizer_config.json",
               fmt::format(R"({{"auto_map": {{"AutoTokenizer": ["{}", null]}}}})", name));
    const Tokenizer tokenizer = Tokenizer::from_file(folder.path().string());
    EXPECT_EQ(tokenizer.encode("abba"), (std::vector<int32_t>{2, 1, 0})) << name;
    EXPECT_EQ(tokenizer.vocab_size(), 3 + 256);
    EXPECT_THROW(tokenizer.encode("c"), InvalidArgument);  // a byte without a rank
  }
}

TEST(Kimi, ContradictingConfigsAreRefused) {
  const auto with_token = [](const std::string& id, const std::string& content) {
    return fmt::format(R"({{"added_tokens_decoder": {{"{}": {{"content": "{}"}}}}, {})", id, content, kConfig + 1);
  };
  expect_refused("DataCorrupted", "YQ== 0\nYg== 1\n", with_token("1", "[BOS]"), {"'b' and '[BOS]' both have id 1"});
  expect_refused("DataCorrupted", "YQ== 0\nYg== 1\n", with_token("2", "b"),
                 {"added token 'b' has id 2; the vocabulary gives it 1"});
  EXPECT_HAS(refusal_of("YQ== 0\n", with_token("x", "b")),
             "tokenizer_config.json: added_tokens_decoder: 'x' is not an id");
}

}  // namespace
}  // namespace eadem::io
