// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

enum class Form { kNfc, kNfd, kNfkc, kNfkd };

bool composes(Form form) { return form == Form::kNfc || form == Form::kNfkc; }
bool is_compatible(Form form) { return form == Form::kNfkc || form == Form::kNfkd; }

const utf8proc_property_t& property_of(char32_t c) { return *utf8proc_get_property(static_cast<utf8proc_int32_t>(c)); }

// A starter that the form leaves alone whatever its neighbours are, except that it may compose with what follows if
// it is below U+0300. It has no decomposition and, from U+0300 on, no part in any composition.
bool is_inert(char32_t c, Form form) {
  if (c < 0x80) return true;
  if (c < 0x300 && form == Form::kNfc) return true;
  if (composes(form) ? c >= 0x1100 && c <= 0x11FF : c >= 0xAC00 && c <= 0xD7A3) return false;  // Hangul goes by rule
  const utf8proc_property_t& property = property_of(c);
  return property.combining_class == 0 && property.decomp_seqindex == UINT16_MAX &&
         (!composes(form) || property.comb_index == UINT16_MAX);
}

// The canonical order: every run of characters with a combining class, sorted by class and stable. A counting sort,
// since a text may be one run.
void order_marks(std::vector<utf8proc_int32_t>& chars, TextWork& work) {
  const auto klass = [&](size_t i) {
    return static_cast<uint8_t>(property_of(static_cast<char32_t>(chars[i])).combining_class);
  };
  std::vector<utf8proc_int32_t> sorted;
  for (size_t begin = 0; begin < chars.size();) {
    work.tick();
    size_t count[257] = {};
    size_t end = begin;
    for (uint8_t k; end < chars.size() && (k = klass(end)) != 0; ++end) {
      ++count[k + 1];
      work.tick();
    }
    if (end - begin > 1) {
      for (size_t k = 1; k < std::size(count); ++k) count[k] += count[k - 1];
      sorted.resize(end - begin);
      for (size_t i = begin; i < end; ++i) {
        sorted[count[klass(i)]++] = chars[i];
        work.tick();
      }
      std::copy(sorted.begin(), sorted.end(), chars.begin() + static_cast<ptrdiff_t>(begin));
    }
    begin = end + 1;  // the starter at `end` stays where it is
  }
}

// Appends the normal form of `text`. Scratch is kept between calls.
void append_normal_form(std::string& out, std::string_view text, Form form, std::vector<utf8proc_int32_t>& chars,
                        TextWork& work) {
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                      (is_compatible(form) ? UTF8PROC_COMPAT : 0));
  chars.clear();
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = decode_valid_utf8(text.data() + pos);
    pos += static_cast<size_t>(step.length);
    utf8proc_int32_t parts[32];  // the longest decomposition, of U+FDFA, has 18
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.value), parts, std::size(parts), options, nullptr);
    EADEM_CHECK(count >= 0 && count <= static_cast<utf8proc_ssize_t>(std::size(parts)), "U+{:04X} decomposes into {}",
                static_cast<uint32_t>(step.value), count);
    chars.insert(chars.end(), parts, parts + count);
    work.tick();
  }
  order_marks(chars, work);
  if (composes(form)) {
    const utf8proc_ssize_t count =
        utf8proc_normalize_utf32(chars.data(), static_cast<utf8proc_ssize_t>(chars.size()),
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    EADEM_CHECK(count >= 0, "composing {} characters: {}", chars.size(), utf8proc_errmsg(count));
    chars.resize(static_cast<size_t>(count));
  }
  for (const utf8proc_int32_t c : chars) append_utf8(out, static_cast<char32_t>(c));
}

// The normal form of the stretches that may change, each with the character before it if that may compose with it;
// the rest is copied.
void normalize_form(std::string& text, Form form, TextWork& work) {
  std::string out;
  std::vector<utf8proc_int32_t> scratch;
  size_t copied = 0, previous = 0;
  for (size_t pos = 0; pos < text.size();) {
    work.tick();
    const Utf8Step step = decode_valid_utf8(text.data() + pos);
    if (is_inert(step.value, form)) {
      previous = pos;
      pos += static_cast<size_t>(step.length);
      continue;
    }
    const size_t begin = composes(form) ? std::max(previous, copied) : pos;
    while (pos < text.size()) {
      work.tick();
      const Utf8Step next = decode_valid_utf8(text.data() + pos);
      if (is_inert(next.value, form)) break;
      pos += static_cast<size_t>(next.length);
    }
    out.append(text, copied, begin - copied);
    append_normal_form(out, std::string_view(text).substr(begin, pos - begin), form, scratch, work);
    copied = pos;
  }
  if (copied == 0) return;
  out.append(text, copied);
  text = std::move(out);
}

// Returns whether the beginning stays.
bool strip(std::string& text, bool left, bool right) {
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    const Utf8Step step = decode_valid_utf8(text.data() + begin);
    if (char_class(step.value) != CharClass::kSpace) break;
    begin += static_cast<size_t>(step.length);
  }
  while (right && begin < end) {
    size_t last = end - 1;
    while ((static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    if (char_class(decode_valid_utf8(text.data() + last).value) != CharClass::kSpace) break;
    end = last;
  }
  text = text.substr(begin, end - begin);
  return begin == 0;
}

// Rebuilds a text; `edit` appends what stands for a character. Returns whether anything stands for the first one.
template <typename Edit>
bool rewrite_chars(std::string& text, TextWork& work, const Edit& edit) {
  std::string out;
  out.reserve(text.size());
  bool keeps_first = true;
  for (size_t pos = 0; pos < text.size();) {
    work.tick();
    const Utf8Step step = decode_valid_utf8(text.data() + pos);
    edit(step.value, out);
    if (pos == 0) keeps_first = !out.empty();
    pos += static_cast<size_t>(step.length);
  }
  text = std::move(out);
  return keeps_first;
}

template <typename Predicate>
bool drop_chars(std::string& text, TextWork& work, const Predicate& predicate) {
  return rewrite_chars(text, work, [&](char32_t c, std::string& out) {
    if (!predicate(c)) append_utf8(out, c);
  });
}

// Each character by itself, so a final sigma is one like the others.
void lowercase(std::string& text, TextWork& work) {
  rewrite_chars(text, work, [](char32_t c, std::string& out) {
    append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
    if (c == 0x130) append_utf8(out, 0x307);  // the only letter whose small form is two
  });
}

utf8proc_category_t category_of(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

bool is_mark(char32_t c, bool spacing) {
  const utf8proc_category_t category = category_of(c);
  return category == UTF8PROC_CATEGORY_MN ||
         (spacing && (category == UTF8PROC_CATEGORY_MC || category == UTF8PROC_CATEGORY_ME));
}

bool is_chinese(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0x20000 && c <= 0x2A6DF) ||
         (c >= 0x2A700 && c <= 0x2B73F) || (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

// The steps of BertNormalizer, in its order. Returns whether the beginning stays.
bool normalize_bert(std::string& text, const NormalizerStep& step, TextWork& work) {
  bool keeps_first = true;
  if (step.clean_text)
    keeps_first &= rewrite_chars(text, work, [](char32_t c, std::string& out) {
      const utf8proc_category_t category = category_of(c);
      const bool breaks = c == '\t' || c == '\n' || c == '\r';
      const bool dropped = c == 0 || c == 0xFFFD || category == UTF8PROC_CATEGORY_CC ||
                           category == UTF8PROC_CATEGORY_CF || category == UTF8PROC_CATEGORY_CO;
      if (breaks || !dropped) append_utf8(out, char_class(c) == CharClass::kSpace ? U' ' : c);
    });
  if (step.space_chinese)
    rewrite_chars(text, work, [](char32_t c, std::string& out) {
      if (is_chinese(c)) out += ' ';
      append_utf8(out, c);
      if (is_chinese(c)) out += ' ';
    });
  if (step.strip_accents) {
    normalize_form(text, Form::kNfd, work);
    keeps_first &= drop_chars(text, work, [](char32_t c) { return is_mark(c, false); });
  }
  if (step.lowercase) lowercase(text, work);
  return keeps_first;
}

}  // namespace

void check_growth(size_t bytes, const TextWork& work, std::string_view place) {
  if (bytes <= work.max_bytes()) return;
  throw InvalidArgument("{} turns a text of {} bytes into one of {} bytes or more; at most {} are allowed", place,
                        work.text_bytes(), bytes, work.max_bytes());
}

Replacer::Replacer(const Pattern& pattern, std::string content, const std::string& place)
    : place_(place + ": 'Replace'"), content_(std::move(content)) {
  if (pattern.text.empty()) throw DataCorrupted("{}: the pattern of 'Replace' is empty", place);
  if (pattern.kind == Pattern::Kind::kRegex) {
    regex_ = std::make_unique<Regex>(pattern.text, place);
  } else {
    literal_ = pattern.text;
  }
}

bool Replacer::apply(std::string& text, TextWork& work) const {
  if (text.empty()) return true;
  std::string out;
  size_t copied = 0;
  bool found = false, keeps_first = true;
  const auto first_length = static_cast<size_t>(decode_valid_utf8(text.data()).length);
  const auto replace = [&](size_t begin, size_t end) {
    check_growth(out.size() + (begin - copied) + content_.size(), work, place_);
    work.tick();
    out.append(text, copied, begin - copied);
    out += content_;
    copied = end;
    found = true;
    if (begin == 0 && end > 0) keeps_first = !content_.empty() && end == first_length;
  };
  if (regex_) {
    Regex::Scanner scanner(*regex_, work);
    scanner.scan(text);
    for (size_t begin = 0, end = 0; scanner.next(begin, end);) replace(begin, end);
  } else {
    for (size_t at; (at = text.find(literal_, copied)) != std::string::npos;) replace(at, at + literal_.size());
  }
  if (!found) return true;
  check_growth(out.size() + (text.size() - copied), work, place_);
  out.append(text, copied);
  text = std::move(out);
  return keeps_first;
}

Normalizer::Normalizer(const std::vector<NormalizerStep>& steps, const std::string& source) : source_(source) {
  for (const NormalizerStep& spec : steps) {
    Step step{spec, nullptr, nullptr, nullptr};
    if (spec.kind == NormalizerStep::Kind::kReplace) {
      step.replacer = std::make_unique<Replacer>(spec.pattern, spec.content, source + ": normalizer");
    }
    if (spec.kind == NormalizerStep::Kind::kPrecompiled)
      step.map = std::make_unique<const PrecompiledMap>(spec.content, source);
    if (spec.kind == NormalizerStep::Kind::kSentencePiece)
      step.sentencepiece = std::make_unique<const SentencePieceNormalizer>(spec, source);
    steps_.push_back(std::move(step));
  }
}

Normalizer::~Normalizer() = default;

bool Normalizer::apply(std::string& text, TextWork& work) const {
  bool keeps_first = true;
  for (const Step& step : steps_) {
    work.check();
    switch (step.spec.kind) {
      case NormalizerStep::Kind::kPrepend:
        if (!text.empty()) text.insert(0, step.spec.content);
        break;
      case NormalizerStep::Kind::kReplace: keeps_first &= step.replacer->apply(text, work); break;
      case NormalizerStep::Kind::kNfc: normalize_form(text, Form::kNfc, work); break;
      case NormalizerStep::Kind::kNfd: normalize_form(text, Form::kNfd, work); break;
      case NormalizerStep::Kind::kNfkc: normalize_form(text, Form::kNfkc, work); break;
      case NormalizerStep::Kind::kNfkd: normalize_form(text, Form::kNfkd, work); break;
      case NormalizerStep::Kind::kStrip: keeps_first &= strip(text, step.spec.strip_left, step.spec.strip_right); break;
      case NormalizerStep::Kind::kLowercase: lowercase(text, work); break;
      case NormalizerStep::Kind::kStripAccents:
        keeps_first &= drop_chars(text, work, [](char32_t c) { return is_mark(c, true); });
        break;
      case NormalizerStep::Kind::kBert: keeps_first &= normalize_bert(text, step.spec, work); break;
      case NormalizerStep::Kind::kPrecompiled:
        step.spec.longest ? step.map->apply_longest(text, work) : step.map->apply_graphemes(text, work);
        break;
      case NormalizerStep::Kind::kSentencePiece: step.sentencepiece->apply(text, work); break;
    }
    check_growth(text.size(), work, source_ + ": normalizer");
  }
  return keeps_first;
}

}  // namespace eadem::io
