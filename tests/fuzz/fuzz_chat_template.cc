// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a chat template and, after a zero byte, as the variables it is rendered with: refused with a typed
// error, or a text that is UTF-8, in segments of alternating trust.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "eadem/core/error.h"
#include "eadem/io/template/chat_template.h"
#include "eadem/io/text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace eadem::io;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto require = [](bool holds) {
    if (!holds) std::abort();
  };
  const size_t zero = std::min(bytes.find('\0'), bytes.size());
  try {
    const ChatTemplate chat(bytes.substr(0, zero), "fuzz");
    for (const std::string_view text : chat.literals()) require(is_valid_utf8(text));
    TemplateInput input;
    if (zero < bytes.size()) {
      input.variables = parse_json(bytes.substr(zero + 1), "variables", {.max_depth = 32});
      if (!input.variables.is_object()) return 0;
    }
    input.trusted.set("bos_token", "<s>");
    const auto segments = chat.render(input, {.max_work = 1 << 16, .max_output = 1 << 16});
    for (size_t i = 0; i < segments.size(); ++i) {
      require(!segments[i].text.empty());
      require(is_valid_utf8(segments[i].text));
      require(i == 0 || segments[i].trusted != segments[i - 1].trusted);
    }
  } catch (const eadem::Error&) {
  }
  return 0;
}
