// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/texts.h"

#include <gtest/gtest.h>

#include "tests/support/refusal.h"

namespace eadem::train {
namespace {

using test::refusal;

std::vector<std::string> documents(const Texts& texts, const std::string& path, std::string_view content) {
  std::vector<std::string> result;
  int64_t last = 0;
  for_each_document(texts, path, content, [&](std::string_view text, int64_t begin, int64_t end) {
    EXPECT_GE(begin, last);
    EXPECT_GT(end, begin);
    EXPECT_LE(end, static_cast<int64_t>(content.size()));
    last = end;
    result.emplace_back(text);
  });
  return result;
}

using List = std::vector<std::string>;

TEST(Texts, SeparatorsDivideAndWhiteSpaceAroundDocumentsIsDropped) {
  EXPECT_EQ(documents({}, "a.txt", " one \n<|endoftext|>\n\n<|endoftext|>two words"), (List{"one", "two words"}));
  EXPECT_EQ(documents({.separator = "\n\n"}, "a.txt", "one\nmore\n\ntwo\n"), (List{"one\nmore", "two"}));
  EXPECT_EQ(documents({}, "a.txt", "<|endoftext|>"), List{});
  EXPECT_EQ(documents({}, "a.txt", ""), List{});
}

TEST(Texts, JsonLinesAreDocumentsAsTheyAre) {
  const std::string lines =
      "{\"text\": \" one\\n\"}\r\n\n  \n{\"id\": 7, \"text\": \"zwei \\u00e4\"}\n{\"text\": \" \"}";
  EXPECT_EQ(documents({}, "a.jsonl", lines), (List{" one\n", "zwei \u00e4"}));
  EXPECT_EQ(documents({}, "a.ndjson", lines).size(), 2u);
  EXPECT_EQ(documents({.format = TextFormat::json_lines}, "a.txt", lines).size(), 2u);
  EXPECT_EQ(documents({.text_key = "body"}, "a.jsonl", R"({"body": "x", "text": 3})"), List{"x"});
  // By name, and unless the format says otherwise, a .jsonl is not read as plain text, nor the other way round.
  EXPECT_EQ(documents({.format = TextFormat::text}, "a.jsonl", "{\"text\": 1"), List{"{\"text\": 1"});
  EXPECT_EQ(documents({}, "a.json", "{}"), List{"{}"});
}

TEST(Texts, AMalformedLineIsNamed) {
  const auto refused = [](const std::string& content) {
    return refusal([&] { documents({}, "dir/a.jsonl", content); });
  };
  const std::string good = "{\"text\": \"x\"}\n\n";
  for (const char* bad : {"{\"text\": \"x\"", "[1]", "{\"txt\": \"x\"}", "{\"text\": 3}", "{\"text\": null}", "x",
                          "{\"text\": \"a\", \"text\": \"b\"}", "{\"text\": \"\xff\"}"})
    EXPECT_NE(refused(good + bad + "\n" + good).find("dir/a.jsonl:3"), std::string::npos) << refused(good + bad);
  EXPECT_NE(refused("{\"txt\": \"x\"}").find("'text'"), std::string::npos);
  EXPECT_NE(refused("{\"text\": 3}").find("is 3"), std::string::npos);
}

}  // namespace
}  // namespace eadem::train
