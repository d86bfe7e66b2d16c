// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/openai_messages.h"

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

bool has_text_parts(const JsonValue& messages) {
  bool found = false;
  for (size_t i = 0; i < messages.as_array().size(); ++i) {
    const JsonValue* content = messages.as_array()[i].find("content");
    if (content == nullptr || !content->is_array()) continue;
    found = true;
    for (const JsonValue& part : content->as_array()) {
      const JsonValue* text = part.is_object() ? part.find("text") : nullptr;
      if (text != nullptr && text->is_string()) continue;
      const JsonValue* type = part.is_object() ? part.find("type") : nullptr;
      throw Unsupported("messages[{}] has a part of type {}; only texts are read", i,
                        type != nullptr && type->is_string() ? io::quote(type->as_string()) : "(none)");
    }
  }
  return found;
}

JsonValue with_joined_parts(const JsonValue& messages) {
  JsonValue::Array all = messages.as_array();
  for (JsonValue& message : all) {
    const JsonValue* content = message.find("content");
    if (content == nullptr || !content->is_array()) continue;
    std::string text;
    for (const JsonValue& part : content->as_array()) {
      if (&part != &content->as_array().front()) text += '\n';
      text += part.find("text")->as_string();
    }
    message.set("content", std::move(text));
  }
  return all;
}

}  // namespace eadem::engine
