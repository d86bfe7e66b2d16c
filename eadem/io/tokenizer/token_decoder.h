// SPDX-License-Identifier: Apache-2.0
//
// From a token's text to the bytes it stands for: the decoders of tokenizer.json, applied to one token at
// a time. A text is the concatenation of its tokens' bytes, ill-formed UTF-8 replaced by U+FFFD.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/normalizer.h"

namespace eadem::io {

// Immutable and safe to share.
//
// Steps that act on the whole text are accepted where they act on its start alone (Fuse, then Strip at the
// start); others (Strip at the end, Replace after Fuse or ByteFallback) throw Unsupported by name.
class TokenDecoder {
 public:
  explicit TokenDecoder(const TokenizerSpec& spec);
  ~TokenDecoder();

  // Appends the bytes of a token. `first`: it is the first of the text. Throws InvalidArgument when a Replace step
  // makes the token longer than work.max_bytes(). Other errors: see Regex and TextWork.
  void append_token(std::string& bytes, std::string_view token, bool first, TextWork& work) const;

  // After all tokens: up to strip_count() leading strip_char() are dropped from the text.
  int64_t strip_count() const { return strip_count_; }
  char strip_char() const { return strip_char_; }

 private:
  struct Step;
  std::vector<Step> steps_;
  bool join_with_space_;
  int64_t strip_count_ = 0;
  char strip_char_ = ' ';
};

}  // namespace eadem::io
