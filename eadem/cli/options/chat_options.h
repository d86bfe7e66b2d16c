// SPDX-License-Identifier: Apache-2.0
//
// The options of everything that talks through a chat template: `chat` and `run --chat`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eadem/cli/options/arguments.h"
#include "eadem/engine/text/chat_prompt.h"

namespace eadem::cli {

struct ChatTemplateOptions {
  std::optional<std::string> system, chat_template;
  std::vector<std::string> template_args;

  void add(Arguments& arguments);
  // The name of the first of these options that was given, or "".
  std::string_view given() const;
  // Reads a template's file. Throws UsageError for a malformed --template-arg.
  engine::ChatOptions options() const;
};

}  // namespace eadem::cli
