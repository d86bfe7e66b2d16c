// SPDX-License-Identifier: Apache-2.0
//
// A tokenizer.json as GGUF metadata. What GGUF cannot say is refused by name; what was converted is checked on texts
// before it is used. The other direction is io/tokenizer/tokenizer_files.h.
#pragma once

#include <string>

#include "eadem/io/gguf.h"

namespace eadem::cli {

// The tokenizer.ggml.* keys for the tokenizer.json in `directory`, for a model of `vocab` tokens. Throws NotFound or
// Unsupported.
io::GgufMetadata gguf_tokenizer_of(const std::string& directory, int64_t vocab);

}  // namespace eadem::cli
