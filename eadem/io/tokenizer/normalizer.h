// SPDX-License-Identifier: Apache-2.0
//
// The normalizers of tokenizer.json, applied in order to each stretch of text between added tokens.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/precompiled_map.h"
#include "eadem/io/tokenizer/regex.h"
#include "eadem/io/tokenizer/sentencepiece_normalizer.h"
#include "eadem/io/tokenizer/text_work.h"

namespace eadem::io {

// Replaces every match of `pattern` in a text, also empty ones, but nothing in an empty text. Immutable.
class Replacer {
 public:
  Replacer(const Pattern& pattern, std::string content, const std::string& place);
  // Returns whether the text still begins where it did: false when its first character gave way to nothing, or together
  // with others. Throws InvalidArgument when the text would grow beyond work.max_bytes(). Other errors: see Regex and
  // TextWork.
  bool apply(std::string& text, TextWork& work) const;

 private:
  std::string place_;
  std::string literal_;
  std::unique_ptr<Regex> regex_;  // null: literal_
  std::string content_;
};

// Immutable and safe to share. Texts are valid UTF-8 before and after.
class Normalizer {
 public:
  Normalizer(const std::vector<NormalizerStep>& steps, const std::string& source);
  ~Normalizer();

  bool empty() const { return steps_.empty(); }
  // Returns whether the text still begins where it did; a dropped beginning is what Metaspace does not mark as the
  // first word. Time and memory are linear in the text. Throws InvalidArgument, naming both sizes, when a step would
  // make the text larger than work.max_bytes(). Other errors: see Regex and TextWork.
  bool apply(std::string& text, TextWork& work) const;

 private:
  struct Step {
    NormalizerStep spec;
    std::unique_ptr<Replacer> replacer;
    std::unique_ptr<const PrecompiledMap> map;
    std::unique_ptr<const SentencePieceNormalizer> sentencepiece;
  };
  std::string source_;
  std::vector<Step> steps_;
};

// Throws InvalidArgument when a step at `place` would make a text of `bytes` bytes and that is more than allowed.
void check_growth(size_t bytes, const TextWork& work, std::string_view place);

}  // namespace eadem::io
