// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/precompiled_map.h"

#include <utf8proc.h>

#include <cstring>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/normalizer.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {

namespace {

// A unit of the trie. A node's children lie at its place, xor its offset, xor their byte.
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & 0x7FFFFFFFu; }
uint32_t label_of(uint32_t unit) { return unit & 0x800000FFu; }
uint32_t offset_of(uint32_t unit) { return unit >> 10 << ((unit & 0x200u) >> 6); }

constexpr const char* kPlace = "normalizer: 'Precompiled'";

}  // namespace

PrecompiledMap::PrecompiledMap(std::string_view bytes, const std::string& source) {
  uint32_t trie_bytes = 0;
  if (bytes.size() >= sizeof trie_bytes) std::memcpy(&trie_bytes, bytes.data(), sizeof trie_bytes);
  if (bytes.size() < sizeof trie_bytes || trie_bytes % 4 != 0 || trie_bytes == 0 ||
      trie_bytes > bytes.size() - sizeof trie_bytes)
    throw DataCorrupted("{}: precompiled_charsmap of {} bytes says that its trie has {}", source, bytes.size(),
                        trie_bytes);
  units_.resize(trie_bytes / 4);
  std::memcpy(units_.data(), bytes.data() + sizeof trie_bytes, trie_bytes);
  texts_ = bytes.substr(sizeof trie_bytes + trie_bytes);
  if (const size_t bad = find_invalid_utf8(texts_); bad != std::string::npos)
    throw DataCorrupted("{}: precompiled_charsmap: not UTF-8 at byte {} of its texts", source, bad);
}

std::optional<PrecompiledMap::Match> PrecompiledMap::match(std::string_view text, bool longest) const {
  std::optional<Match> best;
  size_t node = offset_of(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    node ^= byte;
    if (byte == 0 || node >= units_.size() || label_of(units_[node]) != byte) break;
    const uint32_t unit = units_[node];
    node ^= offset_of(unit);
    if (node >= units_.size()) break;
    if (!has_leaf(unit)) continue;
    const size_t begin = value_of(units_[node]);
    // A rule that cuts a character, or that is answered from outside of the texts, is none.
    const bool whole = i + 1 == text.size() || (static_cast<unsigned char>(text[i + 1]) & 0xC0) != 0x80;
    if (!whole || begin >= texts_.size() || (begin > 0 && (static_cast<unsigned char>(texts_[begin]) & 0xC0) == 0x80))
      continue;
    const size_t end = texts_.find('\0', begin);
    best = Match{i + 1, std::string_view(texts_).substr(begin, end == std::string::npos ? end : end - begin)};
    if (!longest) break;
  }
  return best;
}

void PrecompiledMap::apply_longest(std::string& text, TextWork& work) const {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    work.tick();
    const std::string_view rest = std::string_view(text).substr(pos);
    if (const auto found = match(rest, true)) {
      out += found->replacement;
      pos += found->length;
      check_growth(out.size(), work, kPlace);
    } else {
      const auto length = static_cast<size_t>(decode_valid_utf8(rest.data()).length);
      out += rest.substr(0, length);
      pos += length;
    }
  }
  text = std::move(out);
}

void PrecompiledMap::apply_graphemes(std::string& text, TextWork& work) const {
  constexpr size_t kWholeBytes = 6;
  std::string out;
  const auto end_of = [&](size_t begin) {
    utf8proc_int32_t state = 0;
    Utf8Step step = decode_valid_utf8(text.data() + begin);
    size_t end = begin + static_cast<size_t>(step.length);
    while (end < text.size()) {
      work.tick();
      const Utf8Step next = decode_valid_utf8(text.data() + end);
      if (utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(step.value),
                                           static_cast<utf8proc_int32_t>(next.value), &state))
        break;
      end += static_cast<size_t>(next.length);
      step = next;
    }
    return end;
  };
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    end = end_of(begin);
    const std::string_view grapheme = std::string_view(text).substr(begin, end - begin);
    if (const auto found = grapheme.size() < kWholeBytes ? match(grapheme, false) : std::nullopt) {
      out += found->replacement;
    } else {
      for (size_t pos = 0; pos < grapheme.size();) {
        const auto length = static_cast<size_t>(decode_valid_utf8(grapheme.data() + pos).length);
        const std::string_view one = grapheme.substr(pos, length);
        const auto rule = match(one, false);
        out += rule ? rule->replacement : one;
        check_growth(out.size(), work, kPlace);
        pos += length;
      }
    }
    check_growth(out.size(), work, kPlace);
  }
  text = std::move(out);
}

}  // namespace eadem::io
