// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/openai_messages.h"

#include <algorithm>
#include <utility>

#include "eadem/core/error.h"
#include "eadem/io/text.h"

namespace eadem::engine {

namespace {

using io::JsonValue;

JsonValue with_object_arguments_of_call(JsonValue call) {
  const JsonValue* function = call.is_object() ? call.find("function") : nullptr;
  const JsonValue* arguments = function != nullptr && function->is_object() ? function->find("arguments") : nullptr;
  if (arguments == nullptr || !arguments->is_string()) return call;
  try {
    JsonValue object = io::parse_json(arguments->as_string(), "arguments");
    if (object.is_object()) call.set("function", JsonValue(*function).set("arguments", std::move(object)));
  } catch (const DataCorrupted&) {  // a model wrote it: it need not be JSON
  }
  return call;
}

// Contents of the role that are lists become what `content` makes of their joined text.
template <typename Content>
JsonValue with_joined(const JsonValue& messages, const std::string& role, const Content& content) {
  JsonValue::Array all = messages.as_array();
  for (JsonValue& message : all) {
    const JsonValue* parts = message.find("content");
    if (message.find("role")->as_string() != role || parts == nullptr || !parts->is_array()) continue;
    std::string text;
    for (const JsonValue& part : parts->as_array()) {
      if (&part != &parts->as_array().front()) text += '\n';
      text += part.find("text")->as_string();
    }
    message.set("content", content(std::move(text)));
  }
  return all;
}

}  // namespace

JsonValue with_object_arguments(const JsonValue& messages) {
  JsonValue::Array all = messages.as_array();
  for (JsonValue& message : all) {
    const JsonValue* calls = message.find("tool_calls");
    if (calls == nullptr || !calls->is_array()) continue;
    JsonValue::Array changed;
    for (const JsonValue& call : calls->as_array()) changed.push_back(with_object_arguments_of_call(call));
    message.set("tool_calls", std::move(changed));
  }
  return all;
}

std::vector<std::string> roles_with_parts(const JsonValue& messages) {
  std::vector<std::string> roles;
  for (size_t i = 0; i < messages.as_array().size(); ++i) {
    const JsonValue* content = messages.as_array()[i].find("content");
    if (content == nullptr || !content->is_array()) continue;
    const std::string& role = messages.as_array()[i].find("role")->as_string();
    if (std::find(roles.begin(), roles.end(), role) == roles.end()) roles.push_back(role);
    for (const JsonValue& part : content->as_array()) {
      const JsonValue* text = part.is_object() ? part.find("text") : nullptr;
      if (text != nullptr && text->is_string()) continue;
      const JsonValue* type = part.is_object() ? part.find("type") : nullptr;
      throw Unsupported("messages[{}] has a part of type {}; only texts are read", i,
                        type != nullptr && type->is_string() ? io::quote(type->as_string()) : "(none)");
    }
  }
  return roles;
}

JsonValue with_joined_parts(const JsonValue& messages, const std::string& role) {
  return with_joined(messages, role, [](std::string text) { return JsonValue(std::move(text)); });
}
JsonValue with_one_part(const JsonValue& messages, const std::string& role) {
  return with_joined(messages, role, [](std::string text) {
    return JsonValue::array().push_back(JsonValue::object().set("type", "text").set("text", std::move(text)));
  });
}

}  // namespace eadem::engine
