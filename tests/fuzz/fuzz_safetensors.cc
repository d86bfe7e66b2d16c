// SPDX-License-Identifier: Apache-2.0
//
// Any bytes either are refused by an eadem::Error or give tensors that can be read from end to end.
#include <cstdint>
#include <memory>

#include "eadem/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace eadem;
  // Borrowed: the data outlives the file.
  const std::shared_ptr<const void> owner(data, [](const void*) {});
  try {
    const auto file = io::SafetensorsFile::parse("input", {reinterpret_cast<const std::byte*>(data), size}, owner);
    for (const io::WeightInfo& info : file->tensors()) {
      if (!info.type) continue;
      const TensorView view = file->get(info.name).view;
      const auto* bytes = static_cast<const volatile uint8_t*>(view.data);
      for (int64_t i = 0; i < view.size_bytes(); ++i) static_cast<void>(bytes[i]);
    }
  } catch (const Error&) {
  }
  return 0;
}
