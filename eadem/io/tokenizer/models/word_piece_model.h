// SPDX-License-Identifier: Apache-2.0
//
// WordPiece: a word is written with the longest token that it begins with, then the longest that continues it, whose
// text has a prefix ("##"). A word that cannot be written so is the unknown token, and so is a very long one.
#pragma once

#include <string>

#include "eadem/io/tokenizer/models/token_model.h"
#include "eadem/io/tokenizer/prefix_index.h"

namespace eadem::io {

class WordPieceModel final : public TokenModel {
 public:
  explicit WordPieceModel(const TokenizerSpec& spec);

  void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids, TextWork& work) const override;

 private:
  PrefixIndex first_, next_;  // tokens that begin a word; those that continue one, without the prefix
  size_t max_chars_;
  int32_t unk_id_ = -1;
};

}  // namespace eadem::io
