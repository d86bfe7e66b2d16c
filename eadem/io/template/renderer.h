// SPDX-License-Identifier: Apache-2.0
//
// Runs the tree of a chat template.
#pragma once

#include "eadem/io/template/ast.h"
#include "eadem/io/template/value.h"

namespace eadem::io::chat {

// The text that `body` writes. `name` is for messages. Throws InvalidArgument, see ChatTemplate::render.
Text render_template(const Body& body, const std::string& name, const TemplateInput& input,
                     const TemplateLimits& limits);

}  // namespace eadem::io::chat
