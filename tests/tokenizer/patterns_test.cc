// SPDX-License-Identifier: Apache-2.0
//
// The hand-written matchers against PCRE2, and the translation of patterns for PCRE2.
#include <gtest/gtest.h>

#include <random>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/pattern_matchers.h"
#include "eadem/io/tokenizer/regex.h"
#include "eadem/io/tokenizer/unicode.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::io {
namespace {

constexpr KnownPattern kPatterns[] = {KnownPattern::kGpt2, KnownPattern::kLlama3, KnownPattern::kQwen2};

// The end of every piece. PCRE2's matches must tile the text too.
std::vector<size_t> ends_by_hand(KnownPattern pattern, std::string_view text) {
  std::vector<size_t> ends;
  for (size_t pos = 0; pos < text.size(); pos = ends.back()) ends.push_back(match_pattern(pattern, text, pos));
  return ends;
}

std::vector<size_t> ends_by_pcre2(const Regex& regex, std::string_view text) {
  std::vector<size_t> ends;
  TextWork work(text.size());
  Regex::Scanner scanner(regex, work);
  scanner.scan(text);
  for (size_t begin = 0, end = 0, last = 0; scanner.next(begin, end); last = end) {
    EXPECT_EQ(begin, last);
    ends.push_back(end);
  }
  return ends;
}

void expect_equal(const std::string& text) {
  for (const KnownPattern pattern : kPatterns) {
    const Regex regex(std::string(pattern_text(pattern)), "test");
    EXPECT_TRUE(ends_by_hand(pattern, text) == ends_by_pcre2(regex, text)) << pattern_name(pattern) << ": " << text;
  }
}

bool is_surrogate(char32_t c) { return c >= 0xD800 && c < 0xE000; }

// Whether PCRE2's Unicode tables (14) class a code point as utf8proc's (15) do.
class Agreement {
 public:
  Agreement() : agrees_(0x110000, true) {
    std::string text;
    std::vector<char32_t> char_at;
    for (char32_t c = 0; c < 0x110000; ++c) {
      if (!is_surrogate(c)) append_utf8(text, c);
      char_at.resize(text.size(), c);
    }
    const std::pair<const char*, CharClass> classes[] = {
        {"\\p{L}", CharClass::kLetter}, {"\\p{N}", CharClass::kNumber}, {"\\s", CharClass::kSpace}};
    for (const auto& [pattern, klass] : classes) {
      std::vector<bool> matched(0x110000);
      const Regex regex(pattern, "test");
      TextWork work(text.size());
      Regex::Scanner scanner(regex, work);
      scanner.scan(text);
      for (size_t begin = 0, end = 0; scanner.next(begin, end);) matched[char_at[begin]] = true;
      for (char32_t c = 0; c < 0x110000; ++c) {
        if (!is_surrogate(c) && matched[c] != (char_class(c) == klass)) agrees_[c] = false;
      }
    }
  }
  bool operator()(char32_t c) const { return agrees_[c]; }

 private:
  std::vector<bool> agrees_;
};

TEST(Patterns, ClassesDifferOnlyInNewCodePoints) {
  const Agreement agrees;
  int num_different = 0;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (agrees(c)) continue;
    ++num_different;
    EXPECT_GT(c, 0xFFFu) << "U+" << std::hex << static_cast<uint32_t>(c);
  }
  // Unicode 15 added 4489 characters to Unicode 14.
  EXPECT_LE(num_different, 4489);
  RecordProperty("num_different", num_different);
}

// A name of a script is its property Script, which the ideographic comma and full stop do not have; in PCRE2 it alone
// would be Script_Extensions, which they have.
TEST(Patterns, ScriptsAreWithoutTheirExtensions) {
  const std::string text = "\xE4\xBD\xA0\xE3\x80\x81\xE3\x80\x85\xE3\x80\x82";  // U+4F60 U+3001 U+3005 U+3002
  const auto matched = [&](const std::string& pattern) {
    const Regex regex(pattern, "test");
    TextWork work(text.size());
    Regex::Scanner scanner(regex, work);
    scanner.scan(text);
    std::vector<size_t> at;
    for (size_t begin = 0, end = 0; scanner.next(begin, end);) at.push_back(begin / 3);
    return at;
  };
  using Places = std::vector<size_t>;
  for (const char* pattern : {"\\p{Han}", "[\\p{Han}]", "\\p{Hani}", "\\P{^Han}", "[^\\P{Han}]"}) {
    EXPECT_EQ(matched(pattern), (Places{0, 2})) << pattern;
  }
  for (const char* pattern : {"\\P{Han}", "\\p{^Han}", "\\p{P}", "[^\\p{L}]"}) {
    EXPECT_EQ(matched(pattern), (Places{1, 3})) << pattern;
  }
  EXPECT_EQ(matched("\\p{Lm}"), (Places{2}));
  EXPECT_EQ(matched("\\p{^Lo}"), (Places{1, 2, 3}));
}

TEST(Patterns, HandWrittenEqualsPcre2OnWikitext) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_equal(read_text(wiki_path()));
}

TEST(Patterns, HandWrittenEqualsPcre2OnRandomText) {
  std::mt19937 random(20240611);
  const char* atoms[] = {" ",
                         " ",
                         "\t",
                         "\n",
                         "\r",
                         "\r\n",
                         "'",
                         "'s",
                         "'S",
                         "'\xC5\xBF",
                         "'re",
                         "'rE",
                         "'LL",
                         "'l",
                         "'v",
                         "a",
                         "Z",
                         "\xC3\xA9",
                         "1",
                         "23",
                         "\xD9\xA2",
                         "\xE2\x85\xA0",
                         "\xC2\xBD",
                         ".",
                         "!",
                         "_",
                         "\xCC\x81",
                         "\xC2\xA0",
                         "\xE3\x80\x80",
                         "\xC2\x85",
                         "\xE1\xA0\x8E",
                         "\xE2\x80\xA8",
                         "\xE4\xB8\x80",
                         "\xF0\x9F\x98\x80",
                         "\xE2\x80\x8D"};
  for (int i = 0; i < 5000; ++i) {
    std::string text;
    for (unsigned n = random() % 24 + 1; n > 0; --n) text += atoms[random() % std::size(atoms)];
    expect_equal(text);
  }
}

TEST(Patterns, HandWrittenEqualsPcre2OnRandomUnicode) {
  const Agreement agrees;
  std::mt19937 random(7);
  std::string text;
  for (int i = 0; i < 200000; ++i) {
    const auto c = static_cast<char32_t>(random() % 4 == 0   ? random() % 0x80
                                         : random() % 3 == 0 ? random() % 0x110000
                                                             : random() % 0x3000);
    if (is_surrogate(c) || !agrees(c)) continue;
    append_utf8(text, c);
  }
  expect_equal(text);
}

TEST(Patterns, LongRunsAreLinear) {
  for (const std::string unit : {" ", "a", "\n", "!", "'", "1", " \n", "a ", "\xE3\x80\x80"}) {
    std::string text;
    while (text.size() < (1 << 20)) text += unit;
    expect_equal(text);
    expect_equal(text + "x");
  }
}

std::vector<std::string> matches(const std::string& pattern, const std::string& text) {
  const Regex regex(pattern, "test");
  TextWork work(text.size());
  Regex::Scanner scanner(regex, work);
  scanner.scan(text);
  std::vector<std::string> out;
  for (size_t begin = 0, end = 0; scanner.next(begin, end);) out.push_back(text.substr(begin, end - begin));
  return out;
}

TEST(Regex, OnigurumaMeaning) {
  using V = std::vector<std::string>;
  EXPECT_EQ(matches("\\s+",
                    "a\xC2\x85"
                    "b\xE1\xA0\x8E"
                    "c"),
            (V{"\xC2\x85"}));  // U+0085 but not U+180E
  EXPECT_EQ(matches("[^\\s]+", "a \xE1\xA0\x8E"), (V{"a", "\xE1\xA0\x8E"}));
  EXPECT_EQ(matches("\\w+", "e\xCC\x81_\xC2\xBD-"), (V{"e\xCC\x81_\xC2\xBD"}));
  // One half and squared are of \w outside of a class alone, the circled 1 never.
  EXPECT_EQ(matches("[\\w]+|\\W", "a\xC2\xBD\xC2\xB2\xE2\x91\xA0"), (V{"a", "\xE2\x91\xA0"}));
  EXPECT_EQ(matches("\\w+", "a\xC2\xBD\xC2\xB2\xE2\x91\xA0"), (V{"a\xC2\xBD\xC2\xB2"}));
  EXPECT_EQ(matches("^a", "a\na"), (V{"a", "a"}));
  EXPECT_EQ(matches("x*", "axxb"), (V{"", "xx", ""}));  // an empty match is none where the last one ended
  EXPECT_EQ(matches("(?=b)", "abab"), (V{"", ""}));
  EXPECT_EQ(matches("\\b\\w+\\b", "e\xCC\x81-\xC2\xBD."), (V{"e\xCC\x81", "\xC2\xBD"}));
  EXPECT_EQ(matches("\\B\\w|\\W", "ab-"), (V{"b", "-"}));
  EXPECT_EQ(matches("\\p{L}+|\\p{N}{1,3}", "ab1234"), (V{"ab", "123", "4"}));
}

TEST(Regex, RefusesWhatItCannotProveEqual) {
  for (const char* pattern :
       {"\\h+", "[\\b]", "[\\W]", "\\Kx", "[[:alpha:]]", "[a[b]]", "[a&&b]", "x{2}+", "(?m:x)", "(?<n>x)", "(?R)",
        "\\1", "[]a]", "(*UTF)x", "\\X", "(?i:mass)", "(?i:(?:x|Fi))", "(?i:\xC3\x9F)"}) {
    EXPECT_THROW(Regex(pattern, "test"), Unsupported) << pattern;
  }
  for (const char* pattern : {"(", "[a", "a\\", "*"}) EXPECT_THROW(Regex(pattern, "test"), DataCorrupted) << pattern;
}

// Patterns that backtrack, on texts in which every byte begins an attempt. A limit for each attempt alone would let the
// second run for minutes.
TEST(Regex, GivesUpWithAnError) {
  for (const auto& [pattern, size] :
       {std::pair("(?:a+)+(?:a+)+(?:a+)+[bc]", 200), std::pair("(?:a|aa){1,20}[bc]", 4000),
        std::pair("a*a*a*[bc]", 20000), std::pair("a*+[bc]", 4'000'000)}) {
    const Regex regex(pattern, "evil.json: pre_tokenizer");
    const std::string text(static_cast<size_t>(size), 'a');
    TextWork work(text.size());
    Regex::Scanner scanner(regex, work);
    scanner.scan(text, 7);
    size_t begin = 0, end = 0;
    try {
      scanner.next(begin, end);
      ADD_FAILURE() << "no limit: " << pattern;
    } catch (const InvalidArgument& error) {
      const std::string message = error.what();
      for (const std::string& word :
           {std::string("evil.json: pre_tokenizer"), "'" + std::string(pattern) + "'",
            std::to_string(work.max_regex_steps()), std::to_string(size), std::string("byte ")}) {
        EXPECT_NE(message.find(word), std::string::npos) << message;
      }
    }
    // The steps may exceed the limit only by the distance of the last step.
    EXPECT_LE(work.regex_steps, work.max_regex_steps() + text.size() + 1) << pattern;
  }
}

// All pieces of a text, and all patterns, share one limit.
TEST(Regex, TheLimitIsOfTheWholeText) {
  const Regex regex("(?:a|aa){1,20}[bc]", "evil.json");
  const std::string piece(300, 'a');
  TextWork alone(piece.size());
  Regex::Scanner first(regex, alone);
  size_t begin = 0, end = 0;
  first.scan(piece.substr(0, 30));
  EXPECT_FALSE(first.next(begin, end));
  TextWork work(piece.size());
  Regex::Scanner scanner(regex, work);
  const auto scan_all = [&] {
    for (int i = 0; i < 10000; ++i) {
      scanner.scan(std::string_view(piece).substr(0, 30));
      scanner.next(begin, end);
    }
  };
  EXPECT_THROW(scan_all(), InvalidArgument);
}

// The third text needs more than the 32 KiB of the thread's stack, so that its match begins again.
TEST(Regex, AMatchThatNeedsALargerStackCountsItsStepsOnce) {
  const Regex regex("(?:ab|c)*d", "test");
  const auto steps = [&](int64_t pairs) {
    std::string text;
    for (int64_t i = 0; i < pairs; ++i) text += "ab";
    text += 'd';
    TextWork work(text.size());
    Regex::Scanner scanner(regex, work);
    scanner.scan(text);
    size_t begin = 1, end = 0;
    EXPECT_TRUE(scanner.next(begin, end)) << pairs;
    EXPECT_EQ(begin, 0u) << pairs;
    EXPECT_EQ(end, text.size()) << pairs;
    return static_cast<int64_t>(work.regex_steps);
  };
  const int64_t of_pair = steps(11) - steps(10);
  EXPECT_EQ(steps(40000), steps(10) + 39990 * of_pair);
}

TEST(Regex, Cancelled) {
  const Regex regex("(?:a|aa){1,20}[bc]", "evil.json");
  const std::string text(4000, 'a');
  const std::atomic<bool> cancel = true;
  TextWork work(text.size(), &cancel);
  Regex::Scanner scanner(regex, work);
  scanner.scan(text);
  size_t begin = 0, end = 0;
  EXPECT_THROW(scanner.next(begin, end), Cancelled);
}

TEST(Unicode, ByteAlphabetIsABijection) {
  for (int byte = 0; byte < 256; ++byte) EXPECT_EQ(byte_from_char(char_from_byte(static_cast<uint8_t>(byte))), byte);
  EXPECT_EQ(byte_from_char(0x144), -1);
  EXPECT_EQ(byte_from_char(0xAD), -1);
  EXPECT_EQ(alphabet_from_bytes(" \n"), "\xC4\xA0\xC4\x8A");
}

TEST(Unicode, LossyFollowsMaximalSubparts) {
  const auto lossy = [](std::string_view text) {
    std::string out;
    append_lossy_utf8(out, text);
    return out;
  };
  const std::string r = "\xEF\xBF\xBD";
  // The example of the Unicode standard, table 3-8.
  EXPECT_EQ(lossy("a\xF1\x80\x80\xE1\x80\xC2"
                  "b\x80"
                  "c\x80\xBF"
                  "d"),
            "a" + r + r + r + "b" + r + "c" + r + r + "d");
  EXPECT_EQ(lossy("\xED\xA0\x80"), r + r + r);
  EXPECT_EQ(lossy("\xF0\x9F\x98"), r);
}

}  // namespace
}  // namespace eadem::io
