// SPDX-License-Identifier: Apache-2.0
//
// NamedTemplate: the source of one of a model's chat templates.
#pragma once

#include <string>

namespace eadem::io {

struct NamedTemplate {
  std::string name;    // "default", "tool_use" ...
  std::string source;  // Jinja
  std::string place;   // the file, or file and key, for messages
};

}  // namespace eadem::io
