// SPDX-License-Identifier: Apache-2.0
//
// Messages as OpenAI's API spells them, turned into what chat templates read.
#pragma once

#include <string>
#include <vector>

#include "eadem/io/json.h"

namespace eadem::engine {

// All take an array of objects.

// Tool calls whose `arguments` are the JSON text of an object have that object instead. Text of another kind stays.
io::JsonValue with_object_arguments(const io::JsonValue& messages);

// The roles of messages whose content is a list of parts. Throws Unsupported, naming the message, for a part that is
// not a text, such as an image. Messages have roles.
std::vector<std::string> roles_with_parts(const io::JsonValue& messages);

// Contents of this role that are lists of text parts have one text each, the parts on lines of their own: as the
// content, or as its only part.
io::JsonValue with_joined_parts(const io::JsonValue& messages, const std::string& role);
io::JsonValue with_one_part(const io::JsonValue& messages, const std::string& role);

}  // namespace eadem::engine
