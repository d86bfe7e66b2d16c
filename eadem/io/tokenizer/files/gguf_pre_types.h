// SPDX-License-Identifier: Apache-2.0
//
// tokenizer.ggml.pre: how a GGUF file names the pre-tokenizer of a BPE vocabulary.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/pattern_matchers.h"

namespace eadem::io {

// Patterns apply one after another, each inside the pieces that the one before it left. What a pattern matches and
// what lies between matches are pieces.
struct GgufPreType {
  std::string_view name;
  std::span<const std::string_view> patterns;
  bool ignore_merges = false;  // a piece that is a token is not split
  bool add_bos = false;        // unless the file says otherwise
  bool byte_level = true;      // false: SentencePiece spelling with U+2581 for a space and <0xNN> for bytes
};

std::span<const GgufPreType> gguf_pre_types();
// Returns the steps of a tokenizer.json that cut texts as `type` does.
std::vector<PreTokenizerStep> steps_of(const GgufPreType& type);
// Null if there is none of this name.
const GgufPreType* find_gguf_pre_type(std::string_view name);

// All names, for messages: "gpt-2, llama-bpe, ...".
std::string gguf_pre_type_names();

}  // namespace eadem::io
