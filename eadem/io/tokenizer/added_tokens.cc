// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/added_tokens.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

// The start of the code point that ends at `end` (> 0) of a valid text.
size_t previous_char(std::string_view text, size_t end) {
  do --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

bool is_word_at(std::string_view text, size_t pos) { return is_word(decode_valid_utf8(text.data() + pos).value); }
bool is_space_at(std::string_view text, size_t pos) {
  return char_class(decode_valid_utf8(text.data() + pos).value) == CharClass::kSpace;
}

const TrustRun& run_at(std::span<const TrustRun> runs, size_t pos) {
  return *std::upper_bound(runs.begin(), runs.end(), pos,
                           [](size_t value, const TrustRun& run) { return value < run.end; });
}
bool is_special(const AddedToken& token, std::span<const int32_t> control) {
  return token.special || std::binary_search(control.begin(), control.end(), token.id);
}

bool is_trusted_at(std::span<const TrustRun> runs, size_t pos) { return runs.empty() || run_at(runs, pos).trusted; }

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<std::pair<std::string, AddedToken>> patterns,
                                     const std::string& source) {
  token_at_node_.push_back(-1);
  for (auto& [pattern, token] : patterns) {
    if (pattern.empty()) throw DataCorrupted("{}: added token {} is empty", source, token.id);
    if (pattern.size() > kMaxPattern) {
      throw Unsupported("{}: added token {} has {} bytes; at most {} are taken", source, token.id, pattern.size(),
                        kMaxPattern);
    }
    uint32_t node = 0;
    for (const char c : pattern) {
      const auto [child, inserted] = children_.try_emplace(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(c),
                                                           static_cast<uint32_t>(token_at_node_.size()));
      if (inserted) token_at_node_.push_back(-1);
      node = child->second;
    }
    if (token_at_node_[node] < 0) token_at_node_[node] = static_cast<int32_t>(tokens_.size());
    starts_[static_cast<uint8_t>(pattern[0])] = true;
    tokens_.push_back(std::move(token));
  }
}

AddedTokenMatcher::Match AddedTokenMatcher::longest_match(std::string_view text, size_t begin) const {
  Match best{begin, -1};
  uint32_t node = 0;
  for (size_t pos = begin; pos < text.size();) {
    const auto child = children_.find(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(text[pos]));
    if (child == children_.end()) break;
    node = child->second;
    ++pos;
    if (token_at_node_[node] >= 0) best = {pos, token_at_node_[node]};
  }
  return best;
}

// The match at `begin` that borders of trust allow, or none. Text that is not trusted must not lengthen a match over a
// special token that ends before it, nor begin one that reaches into a special token.
AddedTokenMatcher::Match AddedTokenMatcher::trusted_match(std::string_view text, size_t begin,
                                                          std::span<const TrustRun> runs,
                                                          std::span<const int32_t> control) const {
  const auto special = [&](const Match& match) {
    return match.token >= 0 && is_special(tokens_[static_cast<size_t>(match.token)], control);
  };
  const Match match = longest_match(text, begin);
  if (match.token < 0) return match;
  const TrustRun& run = run_at(runs, begin);
  if (match.end <= run.end) return special(match) && !run.trusted ? Match{begin, -1} : match;
  if (run.trusted) {
    const Match inside = longest_match(text.substr(0, run.end), begin);
    if (special(inside)) return inside;
  }
  if (special(match)) return {begin, -1};
  for (size_t pos = run.end; pos < match.end; ++pos) {
    const TrustRun& other = run_at(runs, pos);
    if (other.trusted && special(longest_match(text.substr(0, other.end), pos))) return {begin, -1};
  }
  return match;
}

bool AddedTokenMatcher::has_special(std::span<const int32_t> control) const {
  return std::any_of(tokens_.begin(), tokens_.end(),
                     [&](const AddedToken& token) { return is_special(token, control); });
}

std::vector<AddedTokenMatcher::Section> AddedTokenMatcher::split(std::string_view text, bool parse_special,
                                                                 TextWork& work, std::span<const TrustRun> runs,
                                                                 std::span<const int32_t> control) const {
  std::vector<Section> sections;
  size_t done = 0;        // where the section last found ends
  size_t spaces_end = 0;  // of the white space that rstrip took last
  for (size_t pos = 0; pos < text.size() && !tokens_.empty();) {
    if (!starts_[static_cast<uint8_t>(text[pos])]) {
      ++pos;
      continue;
    }
    work.tick();
    const Match match = runs.empty() ? longest_match(text, pos) : trusted_match(text, pos, runs, control);
    if (match.token < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(match.token)];
    size_t begin = pos, end = match.end;
    pos = match.end;  // a match that is not taken hides shorter ones at the same place, as in the reference
    const bool special = is_special(token, control);
    if (special && !parse_special) continue;
    if (token.single_word) {
      // Words that are not trusted do not hide a special token either.
      const auto counts = [&](size_t at) { return !special || is_trusted_at(runs, at); };
      const bool word_before = begin > 0 && counts(begin - 1) && is_word_at(text, previous_char(text, begin));
      const bool word_after = end < text.size() && counts(end) && is_word_at(text, end);
      if (word_before || word_after) continue;
    }
    if (token.lstrip) {
      while (begin > done && is_space_at(text, previous_char(text, begin))) begin = previous_char(text, begin);
      begin = std::max(begin, done);  // the token before may have taken the white space, and this one in it
    }
    if (token.rstrip) {
      spaces_end = std::max(spaces_end, end);
      while (spaces_end < text.size() && is_space_at(text, spaces_end)) {
        spaces_end += static_cast<size_t>(decode_valid_utf8(text.data() + spaces_end).length);
      }
      end = spaces_end;
    }
    if (begin >= end) continue;
    if (done < begin) sections.push_back({done, begin, -1});
    sections.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) sections.push_back({done, text.size(), -1});
  return sections;
}

}  // namespace eadem::io
