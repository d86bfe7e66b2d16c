// SPDX-License-Identifier: Apache-2.0
//
// Converts the tokenizer of a directory to GGUF metadata. Features that GGUF cannot express are refused by name,
// and the result is checked on texts before it is used. io/tokenizer/files/tokenizer_files.h converts in the other
// direction.
#pragma once

#include <functional>
#include <string>

#include "eadem/io/gguf.h"

namespace eadem::convert {

// The tokenizer.ggml.* keys for the tokenizer in `directory`, for a model of `vocab` tokens whose general.name is
// `name`. `note` hears of what readers of GGUF files leave out. Throws NotFound or Unsupported.
io::GgufMetadata gguf_tokenizer_of(const std::string& directory, const std::string& name, int64_t vocab,
                                   const std::function<void(const std::string&)>& note);

}  // namespace eadem::convert
