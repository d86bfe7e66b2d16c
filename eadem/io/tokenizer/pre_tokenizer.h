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

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/pattern_matchers.h"
#include "eadem/io/tokenizer/regex.h"

namespace eadem::io {

// A text and the pieces it is cut into, in order and without overlap. Not every byte is in a piece.
struct PreTokenized {
  struct Range {
    size_t begin, end;
  };
  std::string text;
  std::vector<Range> pieces;
  bool at_start = true;  // the first piece begins where the caller's text begins

  std::string_view piece(size_t i) const {
    return std::string_view(text).substr(pieces[i].begin, pieces[i].end - pieces[i].begin);
  }
};

// Immutable and safe to share.
class PreTokenizer {
 public:
  // Throws Unsupported for a second ByteLevel step and for a Metaspace step after one.
  PreTokenizer(const std::vector<PreTokenizerStep>& steps, const std::string& source);
  ~PreTokenizer();

  // `pre.pieces` is set from `pre.text`, which steps that insert characters replace. Steps after ByteLevel see the
  // byte alphabet and may cut inside of a character: `pre.text` holds bytes then. Throws InvalidArgument when a step
  // makes the text longer than work.max_bytes(). Other errors: see Regex and TextWork.
  void apply(PreTokenized& pre, TextWork& work) const;

  // A step is ByteLevel: the model sees the bytes of each piece.
  bool byte_level() const { return byte_level_; }

 private:
  struct Step;
  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace eadem::io
