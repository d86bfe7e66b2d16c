// SPDX-License-Identifier: Apache-2.0
//
// Reasoning and answer are told apart however the text is cut, and nothing is shown that turns out to be a mark.
#include "eadem/engine/text/reasoning.h"

#include <gtest/gtest.h>

#include <vector>

namespace eadem::engine {
namespace {

struct Case {
  bool begins_inside;
  std::string text, reasoning, content;
};

TEST(Reasoning, IsToldFromTheAnswerHoweverItIsCut) {
  const std::vector<Case> cases = {
      {false, "Hello", "", "Hello"},
      {false, "", "", ""},
      {false, "  \n Hello ", "", "  \n Hello "},  // without reasoning nothing is taken away
      {false, "<think>\nwell\n</think>\n\nHello", "well", "Hello"},
      {false, "\n<think>a b</think>c", "a b", "c"},
      {false, "<think>\n\n</think>\n\nHello ", "", "Hello "},
      {false, "<thin air", "", "<thin air"},
      {false, "<thi", "", "<thi"},
      {false, " ", "", " "},
      {false, "a <think>b</think>", "", "a <think>b</think>"},  // not at the beginning: text
      {false, "<think>cut off </th", "cut off </th", ""},
      {false, "<think> cut off \n", "cut off", ""},
      {false, "<think>a</thin>b</think>c", "a</thin>b", "c"},
      {false, "<think>a <think> b</think>c</think>d", "a <think> b", "c</think>d"},
      {false, "<think>a\n\nb \n</think>", "a\n\nb", ""},
      {false, "</think>a", "", "</think>a"},
      {true, "well\n</think>\n\nHello", "well", "Hello"},
      {true, "\n well </think>Hello</think>", "well", "Hello</think>"},
      {true, "<</think>b", "<", "b"},
      {true, "no end", "no end", ""},
      {true, "", "", ""},
      {true, "caf\xc3\xa9</think>\xc3\xa9", "caf\xc3\xa9", "\xc3\xa9"},
  };
  for (const Case& c : cases)
    for (size_t size = 1; size <= c.text.size() + 1; ++size) {
      ReasoningSplitter splitter(c.begins_inside);
      std::string reasoning, content;
      const auto take = [&](const ReasoningSplitter::Piece& piece) {
        EXPECT_TRUE(content.empty() || piece.reasoning.empty());
        reasoning += piece.reasoning;
        content += piece.content;
      };
      for (size_t at = 0; at < c.text.size(); at += size) take(splitter.feed(c.text.substr(at, size)));
      take(splitter.finish());
      EXPECT_EQ(reasoning, c.reasoning) << c.text << " in pieces of " << size;
      EXPECT_EQ(content, c.content) << c.text << " in pieces of " << size;
    }
}

TEST(Reasoning, TextComesAsSoonAsItsPlaceIsKnown) {
  ReasoningSplitter splitter(false);
  EXPECT_EQ(splitter.feed("<think> so").reasoning, "so");
  EXPECT_EQ(splitter.feed(", then <").reasoning, ", then");
  EXPECT_EQ(splitter.feed("b>").reasoning, " <b>");
  EXPECT_EQ(splitter.feed("</think>\n").reasoning, "");
  EXPECT_EQ(splitter.feed("\nYes ").content, "Yes ");
  EXPECT_EQ(splitter.feed("and").content, "and");
}

TEST(Reasoning, MayBeginInThePrompt) {
  using Prompt = std::vector<io::TextSegment>;
  EXPECT_TRUE(ends_inside_reasoning(Prompt{{"hi", false}, {"<|im_end|><|im_start|>assistant\n<think>\n", true}}));
  EXPECT_FALSE(ends_inside_reasoning(Prompt{{"hi", false}, {"<|im_start|>assistant\n<think>\n\n</think>\n\n", true}}));
  EXPECT_FALSE(ends_inside_reasoning(Prompt{{"[INST]", true}, {"<think>", false}}));  // a user wrote it
  EXPECT_FALSE(ends_inside_reasoning(Prompt{}));
}

}  // namespace
}  // namespace eadem::engine
