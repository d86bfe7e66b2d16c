// SPDX-License-Identifier: Apache-2.0
//
// Added tokens: strings that are cut out of a text before the model sees it. Those with `normalized`
// unset are searched in the text as given, the others, in their normalized form, in the normalized text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/text_work.h"

namespace eadem::io {

// A stretch of a text that ends at `end`, and whether special tokens may be read from it.
struct TrustRun {
  size_t end;
  bool trusted;
};

// Finds added tokens in a text, leftmost first and the longest of those. Immutable.
class AddedTokenMatcher {
 public:
  struct Section {
    size_t begin, end;
    int32_t id;  // the token, or -1 for text between tokens
    friend bool operator==(const Section& a, const Section& b) = default;
  };

  // Pairs of the string to search (not empty, at most kMaxPattern bytes) and its token.
  AddedTokenMatcher(std::vector<std::pair<std::string, AddedToken>> patterns, const std::string& source);

  bool empty() const { return tokens_.empty(); }
  // Whether a token is special or one of `control`.
  bool has_special(std::span<const int32_t> control) const;
  // Sections tile the text; the white space that lstrip and rstrip take belongs to the token. Only a token in white
  // space that the one before took is found once more, and the text goes on behind it, as in the reference. Special
  // tokens are left in the text unless `parse_special`. An empty text has no sections. Throws
  // Cancelled, see TextWork.
  //
  // With `runs`, which tile the text, a special token is found if and only if it lies in one trusted run: what stands
  // in the others neither makes one nor hides one. Tokens whose ids are in `control`, which is sorted, count as
  // special.
  std::vector<Section> split(std::string_view text, bool parse_special, TextWork& work,
                             std::span<const TrustRun> runs = {}, std::span<const int32_t> control = {}) const;

  // Bounds the work per byte of a hostile text.
  static constexpr size_t kMaxPattern = 1024;

 private:
  struct Match {
    size_t end;
    int32_t token = -1;  // index into tokens_
  };
  Match longest_match(std::string_view text, size_t begin) const;
  Match trusted_match(std::string_view text, size_t begin, std::span<const TrustRun> runs,
                      std::span<const int32_t> control) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<uint64_t, uint32_t> children_;  // node << 8 | byte -> node; the root is 0
  std::vector<int32_t> token_at_node_;               // index into tokens_, or -1
  bool starts_[256] = {};                            // bytes that begin a pattern
};

}  // namespace eadem::io
