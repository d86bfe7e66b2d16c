// SPDX-License-Identifier: Apache-2.0
//
// TokenModel: what turns a piece of text into ids, once normalizers and pre-tokenizers have cut it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/text_work.h"

namespace eadem::io {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <typename T>
using StringMap = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

// Immutable and safe to share; each thread brings its own Scratch.
class TokenModel {
 public:
  // Memory that a model may use for a piece; kept from piece to piece.
  struct Scratch {
    std::vector<int32_t> ids;
    std::vector<uint32_t> ranks;
    std::vector<int32_t> previous, next;
    std::vector<uint64_t> heap;
    std::vector<double> scores;
  };

  virtual ~TokenModel() = default;

  // Appends the ids of `piece`. Throws InvalidArgument when a character has no token and the vocabulary has neither
  // tokens of all its bytes nor an unknown token; Cancelled, see TextWork.
  virtual void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids, TextWork& work) const = 0;

  // A text may be cut before each U+2581 that follows another character without changing any id.
  virtual bool splits_at_metaspace() const { return false; }
};

// The model that `spec` describes. `byte_level`: pieces are raw bytes and token texts are in the byte alphabet.
// Throws DataCorrupted or Unsupported naming the file and the entry.
std::unique_ptr<const TokenModel> make_token_model(const TokenizerSpec& spec, bool byte_level);

// The ids of the tokens "<0x00>" … "<0xFF>"; -1 for those that the vocabulary lacks.
std::vector<int32_t> byte_token_ids(const TokenizerSpec& spec);

}  // namespace eadem::io
