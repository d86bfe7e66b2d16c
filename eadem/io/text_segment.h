// SPDX-License-Identifier: Apache-2.0
//
// TextSegment: a part of a prompt, and whether special tokens may be read from it.
#pragma once

#include <string>

namespace eadem::io {

struct TextSegment {
  std::string text;
  bool trusted = false;
  friend bool operator==(const TextSegment& a, const TextSegment& b) = default;
};

}  // namespace eadem::io
