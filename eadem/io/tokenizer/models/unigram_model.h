// SPDX-License-Identifier: Apache-2.0
//
// The unigram language model of SentencePiece: of all ways to write a piece as tokens, the one with the largest sum of
// scores (log-probabilities). A character that no token begins with becomes the unknown token, at a score below all
// others; neighbours of it are one token.
// Source: Kudo 2018, "Subword regularization", with the search of sentencepiece's unigram_model.cc (facts only).
#pragma once

#include <string>
#include <vector>

#include "eadem/io/tokenizer/models/token_model.h"
#include "eadem/io/tokenizer/prefix_index.h"

namespace eadem::io {

class UnigramModel final : public TokenModel {
 public:
  explicit UnigramModel(const TokenizerSpec& spec);

  // Time is linear in the piece, times the longest token.
  void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids, TextWork& work) const override;

 private:
  void append(std::string_view text, int32_t id, std::vector<int32_t>& ids) const;

  std::string source_;
  PrefixIndex tokens_;
  std::vector<int32_t> byte_ids_;  // with byte fallback
  int32_t unk_id_ = -1;
  double unk_score_;
  bool single_precision_;
};

}  // namespace eadem::io
