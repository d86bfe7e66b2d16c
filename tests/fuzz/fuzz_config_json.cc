// SPDX-License-Identifier: Apache-2.0
//
// Any text either is refused by an eadem::Error, or is a document that reads without a crash and whose written form
// parses back to the same value.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "eadem/core/error.h"
#include "eadem/io/generation_config.h"
#include "eadem/io/json.h"

namespace {

template <typename Action>
void attempt(Action&& action) {
  try {
    action();
  } catch (const eadem::Error&) {
  }
}

void read_like_a_config(const eadem::io::JsonReader& reader) {
  attempt([&] { reader.string("model_type"); });
  attempt([&] { reader.strings("architectures"); });
  for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"})
    attempt([&] { reader.integer(key, 1, INT32_MAX); });
  attempt([&] { reader.optional_integer("sliding_window", 1); });
  attempt([&] { reader.number("rms_norm_eps", 0, 1); });
  attempt([&] { reader.optional_number("rope_theta", 1); });
  attempt([&] { reader.optional_boolean("tie_word_embeddings"); });
  attempt([&] { reader.integers("eos_token_id", 0); });
  attempt([&] {
    if (const auto scaling = reader.optional_object("rope_scaling")) {
      attempt([&] { scaling->optional_string("rope_type"); });
      attempt([&] { scaling->numbers("short_factor", 0); });
      attempt([&] { scaling->number("factor", 1, 1e6); });
    }
  });
  attempt([&] {
    for (const auto& element : reader.elements("layer_types")) element.unread_keys();
  });
  reader.unread_keys();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace eadem::io;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] { parse_generation_config(text, "generation_config.json"); });
  attempt([&] {
    const JsonReader reader = JsonReader::parse(text, "config.json");
    read_like_a_config(reader);
    if (!(parse_json(to_json(reader.value()), "written") == reader.value())) std::abort();
    if (!(parse_json(to_compact_json(reader.value()), "written") == reader.value())) std::abort();
  });
  return 0;
}
