// SPDX-License-Identifier: Apache-2.0
//
// Tokenizers between tokenizer.json and GGUF metadata. What the other format cannot say is refused by name; what was
// converted is checked on texts before it is used.
#pragma once

#include <string>

#include "eadem/io/gguf.h"

namespace eadem::cli {

// The tokenizer.ggml.* keys for the tokenizer.json in `directory`, for a model of `vocab` tokens. Throws NotFound or
// Unsupported.
io::GgufMetadata gguf_tokenizer_of(const std::string& directory, int64_t vocab);

// Writes tokenizer.json and tokenizer_config.json of a GGUF file's tokenizer into `directory`. Throws Unsupported.
void save_tokenizer_of(const io::GgufFile& file, const std::string& directory);

}  // namespace eadem::cli
