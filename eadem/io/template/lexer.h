// SPDX-License-Identifier: Apache-2.0
//
// Cuts the source of a chat template into tokens as Jinja does with trim_blocks and lstrip_blocks, without
// keep_trailing_newline: the settings of Hugging Face transformers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::io::chat {

enum class TokenKind : uint8_t {
  data,         // text outside of tags
  block_begin,  // {%
  block_end,    // %}
  print_begin,  // {{
  print_end,    // }}
  name,
  string,  // `text` holds the content with escapes replaced
  integer,
  number,
  op,  // `text` is the operator
  end,
};

struct Token {
  TokenKind kind = TokenKind::end;
  int line = 1;
  std::string text;
  int64_t integer = 0;
  double number = 0;
};

// `source` must be valid UTF-8. Comments are dropped; {% raw %} becomes data. Throws DataCorrupted with `name` and the
// line for what Jinja's lexer refuses, and for integers beyond 64 bits. Linear time.
std::vector<Token> tokenize_template(std::string_view source, const std::string& name);

}  // namespace eadem::io::chat
