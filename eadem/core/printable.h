// SPDX-License-Identifier: Apache-2.0
//
// Text from files and users, made safe to show: on a terminal, in a message, in a log.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace eadem {

// The number of bytes of the UTF-8 sequence that starts at text[pos], or 0 if it is malformed (overlong forms,
// surrogates and code points above U+10FFFF included). pos < text.size().
size_t utf8_sequence_length(std::string_view text, size_t pos);

// `text` as valid UTF-8 that a terminal obeys in nothing but line ends and tabs: other control characters become
// \x1b (C0, DEL) or \u009b (C1), bytes that are not UTF-8 become \xNN. Everything else stays, backslashes too.
std::string printable(std::string_view text);

// "1.2 MB", in powers of 1000.
std::string bytes_text(double bytes);

}  // namespace eadem
