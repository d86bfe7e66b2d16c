// SPDX-License-Identifier: Apache-2.0
//
// The normalizer of SentencePiece's own files: a map of characters, spaces that are spelt U+2581, and symbols of the
// user's, which nothing changes. Mirrors Normalizer::Normalize of the package.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/precompiled_map.h"
#include "eadem/io/tokenizer/prefix_index.h"

namespace eadem::io {

// Immutable and safe to share.
class SentencePieceNormalizer {
 public:
  // Throws DataCorrupted or Unsupported, naming `source`: see PrecompiledMap and PrefixIndex.
  SentencePieceNormalizer(const NormalizerStep& step, const std::string& source);

  // Throws InvalidArgument when the text would grow beyond work.max_bytes().
  void apply(std::string& text, TextWork& work) const;

 private:
  // The beginning of a text that is replaced as a whole, and what replaces it: a symbol stays itself, else the longest
  // rule of the map applies, else one character stays itself. The text is not empty.
  PrecompiledMap::Match prefix_of(std::string_view text) const;

  std::optional<PrecompiledMap> map_;
  PrefixIndex symbols_;
  bool add_dummy_prefix_, remove_extra_whitespaces_;
};

}  // namespace eadem::io
