// SPDX-License-Identifier: Apache-2.0
//
// Any bytes either are refused by an eadem::Error or give metadata and tensors that can be read from end to end, and a
// tokenizer, if there is one, that encodes and decodes.
#include <cstdint>
#include <memory>
#include <vector>

#include "eadem/io/gguf.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace {

template <typename Action>
void attempt(Action&& action) {
  try {
    action();
  } catch (const eadem::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace eadem;
  // Borrowed: the data outlives the file.
  const std::shared_ptr<const void> owner(data, [](const void*) {});
  attempt([&] {
    const auto file = io::GgufFile::parse("input", {reinterpret_cast<const std::byte*>(data), size}, owner);
    for (const auto& pair : file->metadata()) {
      const std::string& key = pair.first;
      attempt([&] { file->integer(key, -100, 100); });
      attempt([&] { file->number(key); });
      attempt([&] { file->boolean(key); });
      attempt([&] { file->string(key); });
      attempt([&] { file->strings(key); });
      attempt([&] { file->integers(key, INT64_MIN, INT64_MAX); });
      attempt([&] { file->numbers(key); });
    }
    attempt([&] {
      const io::Tokenizer tokenizer = io::tokenizer_from_gguf(*file);
      tokenizer.decode(tokenizer.encode(" ab  b's 1234\n\xC3\xA9\xE4\xB8\xAD<s>"), false);
    });
    for (const io::WeightInfo& info : file->tensors()) {
      if (!info.type) continue;
      const TensorView view = file->get(info.name).view;
      if (view.shape.num_elements() == 0) continue;  // its other dimensions may be anything
      if (view.encoding != nullptr) {
        std::vector<float> row(static_cast<size_t>(view.shape[view.shape.rank() - 1]));
        for (int64_t i = 0; i < view.encoding->num_pieces(view.shape); ++i)
          view.encoding->decode_row(row.data(), view, i);
        continue;
      }
      const auto* bytes = static_cast<const volatile uint8_t*>(view.data);
      for (int64_t i = 0; i < view.size_bytes(); ++i) static_cast<void>(bytes[i]);
    }
  });
  return 0;
}
