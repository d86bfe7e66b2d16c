// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/pattern_matchers.h"

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

constexpr std::string_view kGpt2Text = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3Text =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Text =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Char {
  char32_t value;
  CharClass klass;
  size_t end;
};

Char char_at(std::string_view text, size_t pos) {
  const Utf8Step step = decode_valid_utf8(text.data() + pos);
  return {step.value, char_class(step.value), pos + static_cast<size_t>(step.length)};
}

size_t skip_class(std::string_view text, size_t pos, CharClass klass) {
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if (c.klass != klass) break;
    pos = c.end;
  }
  return pos;
}

// 's 't 'm 'd 're 've 'll at an apostrophe; 0 if none. The case-insensitive form also takes U+017F, the
// long s, which folds to s.
size_t match_contraction(std::string_view text, size_t begin, bool ignore_case) {
  const auto letter = [&](size_t pos) -> char {
    if (pos >= text.size()) return 0;
    if (ignore_case && text.substr(pos, 2) == "\xC5\xBF") return 's';
    const char c = text[pos];
    return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
  };
  const char first = letter(begin + 1);
  if (first == 's') return begin + 1 + (text[begin + 1] == '\xC5' ? 2 : 1);
  if (first == 't' || first == 'm' || first == 'd') return begin + 2;
  const char second = first == 0 ? '\0' : letter(begin + 2);
  if ((first == 'r' || first == 'v') && second == 'e') return begin + 3;
  if (first == 'l' && second == 'l') return begin + 3;
  return 0;
}

// \s+(?!\S)|\s+ : a run of white space without its last character, unless the run ends the text or has only one.
size_t match_space_run(std::string_view text, size_t begin) {
  size_t last = begin, pos = begin;
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if (c.klass != CharClass::kSpace) break;
    last = pos;
    pos = c.end;
  }
  return pos == text.size() || last == begin ? pos : last;
}

// \s*[\r\n]+ : the run of white space up to its last line break; 0 if it has none.
size_t match_to_line_break(std::string_view text, size_t begin) {
  size_t end = 0;
  for (size_t pos = begin; pos < text.size();) {
    const Char c = char_at(text, pos);
    if (c.klass != CharClass::kSpace) break;
    pos = c.end;
    if (c.value == '\r' || c.value == '\n') end = pos;
  }
  return end;
}

size_t match_gpt2(std::string_view text, size_t begin) {
  const Char first = char_at(text, begin);
  if (first.value == '\'') {
    if (const size_t end = match_contraction(text, begin, false)) return end;
  }
  if (first.klass != CharClass::kSpace) return skip_class(text, first.end, first.klass);
  if (first.value == ' ' && first.end < text.size()) {
    const Char second = char_at(text, first.end);
    if (second.klass != CharClass::kSpace) return skip_class(text, second.end, second.klass);
  }
  return match_space_run(text, begin);
}

size_t match_llama3(std::string_view text, size_t begin, int max_digits) {
  const Char first = char_at(text, begin);
  if (first.value == '\'') {
    if (const size_t end = match_contraction(text, begin, true)) return end;
  }
  if (first.klass == CharClass::kLetter) return skip_class(text, first.end, CharClass::kLetter);
  if (first.klass == CharClass::kNumber) {
    size_t end = first.end;
    for (int digits = 1; digits < max_digits && end < text.size(); ++digits) {
      const Char c = char_at(text, end);
      if (c.klass != CharClass::kNumber) break;
      end = c.end;
    }
    return end;
  }
  const bool line_break = first.value == '\r' || first.value == '\n';
  const bool has_second = first.end < text.size();
  const Char second = has_second ? char_at(text, first.end) : Char{};
  if (!line_break && has_second && second.klass == CharClass::kLetter) {
    return skip_class(text, second.end, CharClass::kLetter);
  }
  const bool symbols_after_space = first.value == ' ' && has_second && second.klass == CharClass::kOther;
  if (first.klass == CharClass::kOther || symbols_after_space) {
    size_t end = skip_class(text, first.end, CharClass::kOther);
    while (end < text.size() && (text[end] == '\r' || text[end] == '\n')) ++end;
    return end;
  }
  if (const size_t end = match_to_line_break(text, begin)) return end;
  return match_space_run(text, begin);
}

constexpr KnownPattern kAll[] = {KnownPattern::kGpt2, KnownPattern::kLlama3, KnownPattern::kQwen2};

}  // namespace

std::string_view pattern_text(KnownPattern pattern) {
  switch (pattern) {
    case KnownPattern::kGpt2: return kGpt2Text;
    case KnownPattern::kLlama3: return kLlama3Text;
    case KnownPattern::kQwen2: return kQwen2Text;
  }
  EADEM_UNREACHABLE("pattern {}", static_cast<int>(pattern));
}

std::string_view pattern_name(KnownPattern pattern) {
  switch (pattern) {
    case KnownPattern::kGpt2: return "gpt2";
    case KnownPattern::kLlama3: return "llama3";
    case KnownPattern::kQwen2: return "qwen2";
  }
  EADEM_UNREACHABLE("pattern {}", static_cast<int>(pattern));
}

std::optional<KnownPattern> known_pattern(std::string_view text) {
  for (const KnownPattern pattern : kAll) {
    if (pattern_text(pattern) == text) return pattern;
  }
  return std::nullopt;
}

std::optional<KnownPattern> known_pattern_by_name(std::string_view name) {
  for (const KnownPattern pattern : kAll) {
    if (pattern_name(pattern) == name) return pattern;
  }
  return std::nullopt;
}

size_t match_pattern(KnownPattern pattern, std::string_view text, size_t begin) {
  switch (pattern) {
    case KnownPattern::kGpt2: return match_gpt2(text, begin);
    case KnownPattern::kLlama3: return match_llama3(text, begin, 3);
    case KnownPattern::kQwen2: return match_llama3(text, begin, 1);
  }
  EADEM_UNREACHABLE("pattern {}", static_cast<int>(pattern));
}

}  // namespace eadem::io
