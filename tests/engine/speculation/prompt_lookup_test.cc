// SPDX-License-Identifier: Apache-2.0
//
// Prompt lookup: against the definition, tried at every place.
#include "eadem/engine/speculation/prompt_lookup.h"

#include <gtest/gtest.h>

#include <random>

namespace eadem::engine {
namespace prompt_lookup_test {

using Ids = std::vector<int32_t>;

Ids looked_up(const Ids& tokens, int64_t depth) {
  Ids drafts = {99};  // of an earlier call
  look_up(drafts, tokens, depth);
  return drafts;
}

TEST(PromptLookup, ProposesWhatFollowedTheLastTokens) {
  EXPECT_EQ(looked_up({1, 2, 3, 4, 5, 9, 1, 2, 3}, 3), Ids({4, 5, 9}));
  EXPECT_EQ(looked_up({1, 2, 3, 4}, 3), Ids()) << "nothing stood there before";
  EXPECT_EQ(looked_up({1, 2, 3, 9, 3}, 3), Ids()) << "one token is too few";
  EXPECT_EQ(looked_up({}, 3), Ids());
  EXPECT_EQ(looked_up({1}, 3), Ids());
}

TEST(PromptLookup, MoreEqualTokensWinAndOfEqualsTheLast) {
  EXPECT_EQ(looked_up({1, 2, 3, 50, 8, 2, 3, 60, 7, 1, 2, 3}, 1), Ids({50}));
  EXPECT_EQ(looked_up({2, 3, 50, 8, 2, 3, 60, 7, 2, 3}, 1), Ids({60}));
  // The fifth equal token does not count.
  EXPECT_EQ(looked_up({0, 1, 2, 3, 4, 50, 9, 1, 2, 3, 4, 60, 0, 1, 2, 3, 4}, 1), Ids({60}));
}

TEST(PromptLookup, GoesRoundWithATextThatDoes) {
  EXPECT_EQ(looked_up({7, 1, 2, 1, 2, 1, 2}, 5), Ids({1, 2, 1, 2, 1}));
  EXPECT_EQ(looked_up({4, 4, 4}, 4), Ids({4, 4, 4, 4}));
}

// The place that the definition names: the longest match of at most 4 and at least 2 tokens, the last of equals.
TEST(PromptLookup, IsTheDefinition) {
  std::mt19937 random(3);
  int64_t found = 0;
  for (int round = 0; round < 3000; ++round) {
    Ids tokens(random() % 40);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 4);
    const auto size = std::ssize(tokens);
    Ids expected;
    for (int64_t length = 4; length >= 2 && expected.empty(); --length)
      for (int64_t end = size - 1; end >= length && expected.empty(); --end)
        if (std::equal(tokens.end() - length, tokens.end(), tokens.begin() + (end - length)))
          expected = {tokens[static_cast<size_t>(end)]};
    const Ids drafts = looked_up(tokens, 1);
    ASSERT_EQ(drafts, expected);
    found += std::ssize(drafts);
  }
  EXPECT_GT(found, 1000);
}

}  // namespace prompt_lookup_test
}  // namespace eadem::engine
