// SPDX-License-Identifier: Apache-2.0
//
// The pre-tokenizers of tokenizer.json: they cut a normalized text into the pieces inside which the model
// merges. Behaviour mirrors the Hugging Face `tokenizers` library, the reference of the format.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/pattern_matchers.h"
#include "eadem/io/tokenizer/regex.h"
#include "eadem/io/tokenizer/spec.h"

namespace eadem::io {

// A text and the pieces it is cut into, in order and without overlap. Not every byte is in a piece.
struct PreTokenized {
  struct Range {
    size_t begin, end;
  };
  std::string text;
  std::vector<Range> pieces;
  bool at_start = true;  // the text begins where the caller's text begins

  std::string_view piece(size_t i) const {
    return std::string_view(text).substr(pieces[i].begin, pieces[i].end - pieces[i].begin);
  }
};

// Immutable and safe to share.
class PreTokenizer {
 public:
  // Throws Unsupported when a ByteLevel step is not the last: later steps would see the byte alphabet.
  PreTokenizer(const std::vector<PreTokenizerStep>& steps, const std::string& source);
  ~PreTokenizer();

  // `pre.pieces` is set from `pre.text`, which steps that insert characters replace.
  void apply(PreTokenized& pre) const;

  // The last step is ByteLevel: the model sees each piece's bytes in the byte alphabet.
  bool byte_level() const { return byte_level_; }

 private:
  struct Step;
  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace eadem::io
