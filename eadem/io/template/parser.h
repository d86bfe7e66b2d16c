// SPDX-License-Identifier: Apache-2.0
//
// Reads a chat template into a tree.
#pragma once

#include <string>
#include <string_view>

#include "eadem/io/template/ast.h"

namespace eadem::io::chat {

// Throws DataCorrupted for a syntax error, and Unsupported for a tag, filter, test, function or method that exists in
// Jinja or Python but not here, or nowhere; both name `name`, the line and the construct. Trees are at most 200 deep.
Body parse_template(std::string_view source, const std::string& name);

}  // namespace eadem::io::chat
