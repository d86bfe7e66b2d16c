// SPDX-License-Identifier: Apache-2.0
//
// The normal forms of Unicode, against Python's unicodedata, and the limits of normalization.
#include <gtest/gtest.h>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/normalizer.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

using Kind = NormalizerStep::Kind;

std::string normalized(Kind kind, std::string text) {
  NormalizerStep step{};
  step.kind = kind;
  TextWork work(text.size());
  Normalizer({step}, "test").apply(text, work);
  return text;
}

TEST(NormalForms, EqualPythons) {
  const JsonReader goldens = read_golden("normal_forms.json");
  const auto texts = goldens.strings("texts");
  const std::pair<const char*, Kind> forms[] = {
      {"NFC", Kind::kNfc}, {"NFD", Kind::kNfd}, {"NFKC", Kind::kNfkc}, {"NFKD", Kind::kNfkd}};
  for (const auto& [name, kind] : forms) {
    const auto expected = goldens.strings(name);
    ASSERT_EQ(expected.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(normalized(kind, texts[i]), expected[i]) << name << " " << i;
  }
}

// Two million marks after one letter. Sorting them by exchanging neighbours would take hours.
TEST(NormalForms, ALongRunOfMarksTakesLinearTime) {
  constexpr int kPairs = 1'000'000;
  const std::string acute = "\xCC\x81", dot = "\xCC\xA3";  // classes 230 and 220
  std::string text = "a", acutes, dots;
  for (int i = 0; i < kPairs; ++i) {
    text += acute + dot;
    acutes += acute;
    if (i > 0) dots += dot;  // the first makes one letter with the a
  }
  const std::string composed = "\xE1\xBA\xA1";  // U+1EA1
  EXPECT_TRUE(normalized(Kind::kNfc, text) == composed + dots + acutes);
  EXPECT_TRUE(normalized(Kind::kNfkc, text) == composed + dots + acutes);
  EXPECT_TRUE(normalized(Kind::kNfd, text) == "a" + dot + dots + acutes);
  EXPECT_TRUE(normalized(Kind::kNfkd, text) == "a" + dot + dots + acutes);
}

// Each of six steps turns a letter into a thousand: 2 GB of "aaaa" without a limit.
TEST(NormalForms, AmplificationIsRefusedWithBothSizes) {
  NormalizerStep step{};
  step.kind = Kind::kReplace;
  step.pattern = {Pattern::Kind::kString, "a"};
  step.content = std::string(1000, 'a');
  const Normalizer normalizer(std::vector<NormalizerStep>(6, step), "evil.json");
  std::string text = "aaaa";
  TextWork work(text.size());
  try {
    normalizer.apply(text, work);
    ADD_FAILURE() << "no limit";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("evil.json: normalizer: 'Replace' turns a text of 4 bytes"), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(work.max_bytes())), std::string::npos) << message;
  }
  EXPECT_LE(text.size(), work.max_bytes());
}

// The largest growth that Unicode itself asks for is not refused.
TEST(NormalForms, TheLongestDecompositionsAreNotRefused) {
  std::string text, expected;
  const std::string one = normalized(Kind::kNfkc, "\xEF\xB7\xBA");  // U+FDFA: 18 characters
  while (text.size() < (size_t{1} << 20)) text += "\xEF\xB7\xBA", expected += one;
  EXPECT_EQ(one.size(), 33u);
  EXPECT_TRUE(normalized(Kind::kNfkc, text) == expected);
}

TEST(NormalForms, Cancelled) {
  const std::atomic<bool> cancel = true;
  NormalizerStep step{};
  step.kind = Kind::kNfc;
  std::string text = "a";
  for (int i = 0; i < 10000; ++i) text += "\xCC\x81";
  TextWork work(text.size(), &cancel);
  EXPECT_THROW(Normalizer({step}, "test").apply(text, work), Cancelled);
}

}  // namespace
}  // namespace eadem::io
