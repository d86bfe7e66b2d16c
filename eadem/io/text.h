// SPDX-License-Identifier: Apache-2.0
//
// Small helpers for text and sizes that come from files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "eadem/core/printable.h"

namespace eadem::io {

bool is_valid_utf8(std::string_view text);

// Appends the UTF-8 sequence of a code point: at most U+10FFFF and no surrogate.
void append_utf8(std::string& out, char32_t value);

// `text` in single quotes for a message: control characters and malformed bytes as \xNN, long texts cut.
std::string quote(std::string_view text);

// a * b and a + b, or nothing when that overflows.
constexpr std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}
constexpr std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) {
  uint64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

}  // namespace eadem::io
