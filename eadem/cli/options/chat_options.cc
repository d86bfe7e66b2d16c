// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/options/chat_options.h"

#include <filesystem>
#include <system_error>

#include "eadem/io/files/mapped_file.h"

namespace eadem::cli {

namespace {

constexpr int64_t kMaxTemplateBytes = 16 << 20;
constexpr std::string_view kTemplateArg = "--template-arg";

// Reads the value of a --template-arg: as JSON if it is JSON, else as text.
io::JsonValue value_of(const std::string& text) {
  try {
    return io::parse_json(text, std::string(kTemplateArg));
  } catch (const DataCorrupted&) {
    return text;
  }
}

// One --template-arg: NAME=VALUE, or a JSON object of several.
void add_variables(io::JsonValue& variables, const std::string& argument) {
  if (argument.starts_with('{')) {
    try {
      const io::JsonValue object = io::parse_json(argument, std::string(kTemplateArg));
      for (const io::JsonMember& member : object.as_object()) variables.set(member.key, member.value);
    } catch (const DataCorrupted& error) {
      throw UsageError(error.what());
    }
    return;
  }
  const size_t equals = argument.find('=');
  if (equals == 0 || equals == std::string::npos)
    throw UsageError(fmt::format("{} is '{}'; expected NAME=VALUE or a JSON object", kTemplateArg, argument));
  variables.set(argument.substr(0, equals), value_of(argument.substr(equals + 1)));
}

}  // namespace

void ChatTemplateOptions::add(Arguments& arguments) {
  arguments.text("--system", "TEXT", system, "the system message, before the first turn");
  arguments.option("--chat-template", "T", chat_template,
                   "another template: the name of one of the model's, a file, or Jinja source");
  arguments.list("--template-arg", "NAME=VALUE", template_args,
                 "a variable of the template, such as enable_thinking=false; VALUE is JSON, or else text. Also a JSON "
                 "object of several; may be repeated");
}

std::string_view ChatTemplateOptions::given() const {
  if (system) return "--system";
  if (chat_template) return "--chat-template";
  return template_args.empty() ? "" : kTemplateArg;
}

engine::ChatOptions ChatTemplateOptions::options() const {
  engine::ChatOptions options;
  for (const std::string& argument : template_args) add_variables(options.variables, argument);
  if (!chat_template) return options;
  std::error_code not_a_path;  // Jinja source may be too long for a path
  const bool is_file = std::filesystem::is_regular_file(*chat_template, not_a_path);
  options.chat_template = is_file ? io::read_file(*chat_template, kMaxTemplateBytes) : *chat_template;
  return options;
}

}  // namespace eadem::cli
