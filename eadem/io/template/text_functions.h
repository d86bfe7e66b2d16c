// SPDX-License-Identifier: Apache-2.0
//
// Python's functions of str on Text, shared by methods and filters.
#pragma once

#include "eadem/io/template/python_text.h"
#include "eadem/io/template/value.h"

namespace eadem::io::chat {

// Without the characters of `chars`, or white space if null, at either side.
Text strip_text(const Text& text, const std::string* chars, bool left, bool right);

// The parts between separators, at most `limit` cuts (no limit if negative), from the left or from the right.
std::vector<TextRange> split_at(std::string_view text, std::string_view separator, int64_t limit, bool from_right);
std::vector<TextRange> split_at_space(std::string_view text, int64_t limit, bool from_right);

// `from` replaced by `to`, at most `limit` times (no limit if negative). What takes the place of text from the
// conversation is text from the conversation: a template that hides </think> and puts it back makes no token of it.
Text replace_text(Heap& heap, const Text& text, std::string_view from, const Text& to, int64_t limit);

Text title_text(const Text& text);
Text capitalize_text(const Text& text);
// str.isupper or str.islower.
bool text_has_case(std::string_view text, bool upper);

}  // namespace eadem::io::chat
