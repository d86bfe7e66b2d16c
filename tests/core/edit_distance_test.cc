// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/edit_distance.h"

#include <gtest/gtest.h>

namespace eadem {
namespace edit_distance_test {

TEST(EditDistance, CountsSteps) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("abc", ""), 3U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("nrom", "norm"), 1U);  // neighbours are swapped
  EXPECT_EQ(edit_distance("ca", "abc"), 3U);     // no part is changed twice
  EXPECT_EQ(edit_distance("a*", "abc"), 2U);     // a character like others
}

TEST(EditDistance, OfAPattern) {
  EXPECT_EQ(edit_distance("*", "anything", true), 0U);
  EXPECT_EQ(edit_distance("*", "", true), 0U);
  EXPECT_EQ(edit_distance("a*c", "abbbc", true), 0U);
  EXPECT_EQ(edit_distance("a?c", "abc", true), 0U);
  EXPECT_EQ(edit_distance("a?c", "ac", true), 1U);
  EXPECT_EQ(edit_distance("model.nrom*", "model.norm.rms_norm.y", true), 1U);
  EXPECT_EQ(edit_distance("model.nrom*", "sample.token", true), 8U);
}

TEST(EditDistance, TheNearestNamesAreListed) {
  EXPECT_EQ(nearest_names("x", {}), "none");
  EXPECT_EQ(nearest_names("lm_haed", {"norm", "lm_head"}), "'lm_head', 'norm'");
  EXPECT_EQ(nearest_names("c", {"d", "a", "b", "abc"}), "'a', 'b', 'd'");
  EXPECT_EQ(nearest_names("model.nrom*", {"sample.token", "model.norm.rms_norm.y", "select_rows.y"}, true),
            "'model.norm.rms_norm.y', 'select_rows.y', 'sample.token'");
}

TEST(EditDistance, OfVeryLongNamesTheBeginningsCount) {
  const std::string a(10'000'000, 'a'), b(10'000'000, 'b');
  EXPECT_EQ(nearest_names(b + "c", {a, b}), "'" + b + "', '" + a + "'");
}

}  // namespace edit_distance_test
}  // namespace eadem
