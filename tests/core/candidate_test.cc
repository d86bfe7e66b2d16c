// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/candidate.h"

#include <gtest/gtest.h>

namespace eadem {
namespace {

struct Fake {
  std::string_view name;
  double cost_us;            // negative: refuses
  int smallest_request = 0;  // likewise below this
  Verdict can_handle(int request) const {
    if (request < smallest_request) return Verdict::no(fmt::format("{} is below {}", request, smallest_request));
    return cost_us < 0 ? Verdict::no("never") : Verdict::yes(cost_us);
  }
};

const Fake* choose(const std::vector<Fake>& fakes, int request, Decision& decision) {
  std::vector<const Fake*> list;
  for (const Fake& fake : fakes) list.push_back(&fake);
  decision.subject = "fake forward";
  return select(std::span<const Fake* const>(list), request, decision);
}

TEST(Select, TakesTheCheapestAndKeepsEveryAnswer) {
  const std::vector<Fake> fakes = {{"slow", 9.5}, {"quick", 4.06}, {"wide", 1, 100}};
  Decision decision;
  EXPECT_EQ(choose(fakes, 10, decision), &fakes[1]);
  EXPECT_EQ(decision.chosen, 1u);
  EXPECT_EQ(to_string(decision),
            "fake forward: slow  yes  modelled 9.5 us\n"
            "              quick yes  modelled 4.1 us  (chosen)\n"
            "              wide  no   10 is below 100\n");
  Decision larger;
  EXPECT_EQ(choose(fakes, 100, larger), &fakes[2]);
}

TEST(Select, AReasonToAcceptFollowsTheCost) {
  const Decision decision{"fake", {{"a", Verdict::yes(3, "half of the bandwidth")}}, 0};
  EXPECT_EQ(to_string(decision), "fake: a yes  modelled 3.0 us (half of the bandwidth)\n");
}

TEST(Select, NobodyIsNull) {
  Decision decision;
  EXPECT_EQ(choose({{"a", -1}, {"b", 1, 5}}, 0, decision), nullptr);
  EXPECT_FALSE(decision.chosen);
  try {
    throw_no_candidate(decision);
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(),
                 "nothing here can run fake forward:\nfake forward: a no   never\n              b no   0 is below 5\n");
  }
  Decision empty;
  EXPECT_EQ(choose({}, 0, empty), nullptr);
  EXPECT_EQ(to_string(empty), "fake forward: no candidates\n");
}

TEST(Select, OfEqualsTheFirstInTheListIsChosenAndMarked) {
  const std::vector<Fake> fakes = {{"a", 5}, {"b", 2}, {"c", -1}, {"d", 2}};
  Decision decision;
  EXPECT_EQ(choose(fakes, 0, decision), &fakes[1]);
  EXPECT_EQ(to_string(decision),
            "fake forward: a yes  modelled 5.0 us\n"
            "              b yes  modelled 2.0 us  (chosen; first of equals)\n"
            "              c no   never\n"
            "              d yes  modelled 2.0 us\n");
}

TEST(Select, CostsAboveTheCheapestMayBeEqual) {
  for (const std::vector<Fake>& fakes :
       {std::vector<Fake>{{"a", 1}, {"b", 2}, {"c", 2}}, std::vector<Fake>{{"b", 2}, {"a", 1}, {"c", 2}},
        std::vector<Fake>{{"b", 2}, {"c", 2}, {"a", 1}}}) {
    Decision decision;
    const Fake* chosen = choose(fakes, 0, decision);
    ASSERT_NE(chosen, nullptr);
    EXPECT_EQ(chosen->name, "a");
    EXPECT_EQ(to_string(decision).find("equals"), std::string::npos);
  }
}

}  // namespace
}  // namespace eadem
