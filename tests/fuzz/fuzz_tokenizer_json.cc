// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a tokenizer.json: refused with a typed error, or a tokenizer whose encode and decode hold their
// contracts.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "eadem/io/tokenizer/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace eadem::io;
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto require = [](bool holds) {
    if (!holds) std::abort();
  };
  try {
    const Tokenizer tokenizer = Tokenizer::from_json(json, "", "fuzz");
    for (const std::string_view text :
         {"", "a", " Hello  world's 123\n\n<s>x</s> ", "\xC3\xA9\xE2\x96\x81\xF0\x9F\xA6\x99\t"}) {
      try {
        for (const bool special : {true, false}) {
          const auto ids = tokenizer.encode(text, {.add_special_tokens = special, .parse_special = special});
          for (const int32_t id : ids) require(tokenizer.is_token(id));
          const std::string decoded = tokenizer.decode(ids, special);
          require(find_invalid_utf8(decoded) == std::string::npos);
          IncrementalDecoder decoder(tokenizer, special);
          std::string parts;
          for (const int32_t id : ids) parts += decoder.next(id);
          require(parts + decoder.finish() == decoded);
        }
      } catch (const eadem::InvalidArgument&) {
        // A character that the vocabulary cannot express.
      }
    }
  } catch (const eadem::Error&) {
  }
  return 0;
}
