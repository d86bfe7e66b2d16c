// SPDX-License-Identifier: Apache-2.0
//
// Messages as OpenAI's API spells them, turned into what chat templates read.
#pragma once

#include "eadem/io/json.h"

namespace eadem::engine {

// All take an array of objects.

// Tool calls whose `arguments` are the JSON text of an object have that object instead. Text of another kind stays.
io::JsonValue with_object_arguments(const io::JsonValue& messages);

// Whether a content is a list of parts. Throws Unsupported, naming the message, for a part that is not a text, such as
// an image.
bool has_text_parts(const io::JsonValue& messages);

// Contents that are lists of text parts are one text each, the parts on lines of their own.
io::JsonValue with_joined_parts(const io::JsonValue& messages);

}  // namespace eadem::engine
