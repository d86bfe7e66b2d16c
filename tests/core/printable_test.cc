// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/printable.h"

#include <gtest/gtest.h>

namespace eadem {
namespace {

TEST(Printable, KeepsTextLinesAndTabs) {
  for (const char* text :
       {"", "plain", "two\nlines\tand a tab", "C:\\path \\x1b", "naïve – 日本語 🙂", "\u00a0\u00ad"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, EscapesEveryControlCharacter) {
  EXPECT_EQ(printable("a\x1b[31mred\x07"), "a\\x1b[31mred\\x07");
  EXPECT_EQ(printable("over\rwritten\b\x7f"), "over\\x0dwritten\\x08\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\u0080\u009b2J\u009f"), "\\u0080\\u009b2J\\u009f");
  for (int byte = 0; byte < 0x80; ++byte) {
    const char c = static_cast<char>(byte);
    const bool shown = (byte >= 0x20 && byte != 0x7f) || c == '\n' || c == '\t';
    EXPECT_EQ(printable(std::string(1, c)) == std::string(1, c), shown) << byte;
  }
}

TEST(Printable, EscapesWhatIsNotUtf8) {
  EXPECT_EQ(printable("caf\xe9!"), "caf\\xe9!");
  EXPECT_EQ(printable("\x9b"
                      "2J"),
            "\\x9b2J");                                     // a C1 control of 8-bit terminals
  EXPECT_EQ(printable("\xc1\x9b"), "\\xc1\\x9b");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");           // cut short
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

}  // namespace
}  // namespace eadem
