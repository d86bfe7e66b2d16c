// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as SentencePiece's tokenizer.model: refused with a typed error, or a tokenizer whose encode and decode hold
// their contracts.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "eadem/io/tokenizer/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace eadem::io;
  const std::string_view content(reinterpret_cast<const char*>(data), size);
  const auto require = [](bool holds) {
    if (!holds) std::abort();
  };
  try {
    const Tokenizer tokenizer(spec_from_sentencepiece(content, "fuzz"));
    for (const std::string_view text :
         {"", "a", " Once  upon <sep> ab\n\n", "\xC3\xA9\xE2\x96\x81\xF0\x9F\xA6\x99\t"}) {
      try {
        const auto ids = tokenizer.encode(text);
        for (const int32_t id : ids) require(tokenizer.is_token(id));
        require(find_invalid_utf8(tokenizer.decode(ids, false)) == std::string::npos);
      } catch (const eadem::InvalidArgument&) {
        // A character that the vocabulary cannot express.
      }
    }
  } catch (const eadem::Error&) {
  }
  return 0;
}
