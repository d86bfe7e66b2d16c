// SPDX-License-Identifier: Apache-2.0
//
// PrecompiledMap: the normalization rules that SentencePiece trains a vocabulary with (nmt_nfkc and the like), as its
// files hold them: a double-array trie of what is replaced, and the texts that replace it.
//
//   u32 bytes of the trie | the trie, units of u32 | texts, each ended by a zero
//
// All numbers are little endian. Source of the trie's format: github.com/s-yata/darts-clone (facts only).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/text_work.h"

namespace eadem::io {

// Immutable and safe to share.
class PrecompiledMap {
 public:
  // Throws DataCorrupted, naming `source`, for bytes that are not such a map.
  PrecompiledMap(std::string_view bytes, const std::string& source);

  struct Match {
    size_t length;  // of what is replaced
    std::string_view replacement;
  };
  // The longest rule that `text` begins with.
  std::optional<Match> longest(std::string_view text) const { return match(text, true); }

  // As SentencePiece does: from left to right the longest rule that the rest begins with.
  void apply_longest(std::string& text, TextWork& work) const;
  // As the Hugging Face library does: grapheme by grapheme, each as a whole if it has fewer than six bytes and a rule,
  // else character by character. Of the rules that one begins with, the shortest counts.
  void apply_graphemes(std::string& text, TextWork& work) const;

 private:
  // The longest, or the shortest, rule that `text` begins with.
  std::optional<Match> match(std::string_view text, bool longest) const;

  std::vector<uint32_t> units_;
  std::string texts_;
};

}  // namespace eadem::io
