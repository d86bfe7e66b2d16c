// SPDX-License-Identifier: Apache-2.0
//
// JSON as Python writes it. For the sources of json.h.
#pragma once

#include "eadem/io/json.h"

namespace eadem::io {

// Parses as parse_json does, and takes Python's Infinity, which is no JSON, for the object that transformers 5 writes
// in its place: {"__float__": "Infinity"}.
JsonValue parse_python_json(std::string_view text, const std::string& file, const JsonLimits& limits);

}  // namespace eadem::io
