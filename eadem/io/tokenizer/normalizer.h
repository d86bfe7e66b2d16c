// SPDX-License-Identifier: Apache-2.0
//
// The normalizers of tokenizer.json, applied in order to each stretch of text between added tokens.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/regex.h"
#include "eadem/io/tokenizer/spec.h"

namespace eadem::io {

// Replaces every match of `pattern` in a text. Immutable.
class Replacer {
 public:
  Replacer(const Pattern& pattern, std::string content, const std::string& place);
  void apply(std::string& text) const;

 private:
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
  void apply(std::string& text) const;

 private:
  struct Step {
    NormalizerStep spec;
    std::unique_ptr<Replacer> replacer;
  };
  std::vector<Step> steps_;
};

}  // namespace eadem::io
