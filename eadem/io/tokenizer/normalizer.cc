// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

// A character that NFC leaves alone whatever its neighbours are, except that one below U+0300 may compose with
// what follows. It has no decomposition, no combining class and, from U+0300 on, no part in any composition.
bool is_surely_nfc(char32_t c) {
  if (c < 0x300) return true;
  if (c >= 0x1100 && c <= 0x11FF) return false;  // Hangul jamo compose by rule
  const utf8proc_property_t* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
  return property->combining_class == 0 && property->decomp_seqindex == UINT16_MAX &&
         property->comb_index == UINT16_MAX;
}

void normalize_form(std::string& text, int options) {
  // ASCII is its own normal form in all four.
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &result, static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  if (length == UTF8PROC_ERROR_NOMEM) throw OutOfMemory("Unicode normalization of {} bytes", text.size());
  if (length < 0) throw InvalidArgument("Unicode normalization of {} bytes: {}", text.size(), utf8proc_errmsg(length));
  text.assign(reinterpret_cast<const char*>(result), static_cast<size_t>(length));
}

// NFC of the stretches that may change, each with the character before it; the rest is copied.
void normalize_nfc(std::string& text) {
  std::string out, stretch;
  size_t copied = 0, previous = 0;
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = decode_valid_utf8(text.data() + pos);
    if (is_surely_nfc(step.value)) {
      previous = pos;
      pos += static_cast<size_t>(step.length);
      continue;
    }
    const size_t begin = std::max(previous, copied);
    while (pos < text.size()) {
      const Utf8Step next = decode_valid_utf8(text.data() + pos);
      if (is_surely_nfc(next.value)) break;
      pos += static_cast<size_t>(next.length);
    }
    stretch.assign(text, begin, pos - begin);
    normalize_form(stretch, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    out.append(text, copied, begin - copied);
    out += stretch;
    copied = pos;
  }
  if (copied == 0) return;
  out.append(text, copied);
  text = std::move(out);
}

void strip(std::string& text, bool left, bool right) {
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
}

}  // namespace

Replacer::Replacer(const Pattern& pattern, std::string content, const std::string& place)
    : content_(std::move(content)) {
  if (pattern.text.empty()) throw DataCorrupted("{}: the pattern of 'Replace' is empty", place);
  if (pattern.kind == Pattern::Kind::kRegex) {
    regex_ = std::make_unique<Regex>(pattern.text, place);
  } else {
    literal_ = pattern.text;
  }
}

void Replacer::apply(std::string& text) const {
  std::string out;
  size_t copied = 0;
  if (regex_) {
    Regex::Scanner scanner(*regex_, text);
    for (size_t begin = 0, end = 0; scanner.next(begin, end); copied = end) {
      out.append(text, copied, begin - copied);
      out += content_;
    }
  } else {
    for (size_t at; (at = text.find(literal_, copied)) != std::string::npos; copied = at + literal_.size()) {
      out.append(text, copied, at - copied);
      out += content_;
    }
  }
  if (copied == 0) return;
  out.append(text, copied);
  text = std::move(out);
}

Normalizer::Normalizer(const std::vector<NormalizerStep>& steps, const std::string& source) {
  for (const NormalizerStep& spec : steps) {
    Step step{spec, nullptr};
    if (spec.kind == NormalizerStep::Kind::kReplace) {
      step.replacer = std::make_unique<Replacer>(spec.pattern, spec.content, source + ": normalizer");
    }
    steps_.push_back(std::move(step));
  }
}

Normalizer::~Normalizer() = default;

void Normalizer::apply(std::string& text) const {
  for (const Step& step : steps_) {
    switch (step.spec.kind) {
      case NormalizerStep::Kind::kPrepend:
        if (!text.empty()) text.insert(0, step.spec.content);
        break;
      case NormalizerStep::Kind::kReplace: step.replacer->apply(text); break;
      case NormalizerStep::Kind::kNfc: normalize_nfc(text); break;
      case NormalizerStep::Kind::kNfd: normalize_form(text, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE); break;
      case NormalizerStep::Kind::kNfkc:
        normalize_form(text, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
        break;
      case NormalizerStep::Kind::kNfkd:
        normalize_form(text, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
        break;
      case NormalizerStep::Kind::kStrip: strip(text, step.spec.strip_left, step.spec.strip_right); break;
    }
  }
}

}  // namespace eadem::io
