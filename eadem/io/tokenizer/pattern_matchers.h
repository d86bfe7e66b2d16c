// SPDX-License-Identifier: Apache-2.0
//
// Hand-written matchers for the three pre-tokenizer patterns in common use. Each equals its pattern,
// which the tests check against PCRE2; other patterns go through PCRE2.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace eadem::io {

enum class KnownPattern { kGpt2, kLlama3, kQwen2 };

// The pattern as it stands in tokenizer.json files.
std::string_view pattern_text(KnownPattern pattern);
std::optional<KnownPattern> known_pattern(std::string_view text);

// "gpt2", "llama3", "qwen2": the names that the command line and messages use.
std::string_view pattern_name(KnownPattern pattern);
std::optional<KnownPattern> known_pattern_by_name(std::string_view name);

// The end of the piece that starts at `begin` (< text.size()). Every position starts a piece, so pieces
// tile the text. `text` is valid UTF-8. Total time over a text is linear in its length.
size_t match_pattern(KnownPattern pattern, std::string_view text, size_t begin);

}  // namespace eadem::io
