// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a tiktoken.model of Kimi: refused with a typed error, or a tokenizer whose encode and decode hold their
// contracts.
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
  static const JsonReader config =
      JsonReader::parse(R"({"auto_map": {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"}})", "fuzz");
  const std::string_view content(reinterpret_cast<const char*>(data), size);
  const auto require = [](bool holds) {
    if (!holds) std::abort();
  };
  try {
    const Tokenizer tokenizer(spec_from_tiktoken(content, "fuzz", &config));
    for (const std::string_view text : {"", "a", " Once  upon's 123 ABc\n\n<|reserved_token_3|>",
                                        "\xC3\xA9\xE4\xBD\xA0\xE3\x80\x81\xF0\x9F\xA6\x99\t"}) {
      try {
        const auto ids = tokenizer.encode(text);
        for (const int32_t id : ids) require(tokenizer.is_token(id));
        require(tokenizer.decode(ids, false) == text);
      } catch (const eadem::InvalidArgument&) {
        // A byte that has no rank.
      }
    }
  } catch (const eadem::Error&) {
  }
  return 0;
}
