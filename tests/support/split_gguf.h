// SPDX-License-Identifier: Apache-2.0
//
// Writes the parts of a split GGUF model as llama.cpp's gguf-split does.
#pragma once

#include <string>
#include <vector>

#include "eadem/io/gguf.h"
#include "eadem/io/gguf_parts.h"

namespace eadem::test {

// Splits `whole` into `count` parts of about as many tensors, STEM-00001-of-0000N.gguf and so on; returns their paths.
inline std::vector<std::string> split_gguf(const std::string& whole, const std::string& stem, int64_t count) {
  const auto file = io::GgufFile::open(whole);
  const auto num_tensors = static_cast<int64_t>(file->tensors().size());
  std::vector<std::string> paths;
  for (int64_t part = 0; part < count; ++part) {
    io::GgufMetadata metadata = part == 0 ? file->metadata() : io::GgufMetadata{};
    metadata.emplace_back("split.no", io::GgufValue::scalar(static_cast<uint16_t>(part)));
    metadata.emplace_back("split.count", io::GgufValue::scalar(static_cast<uint16_t>(count)));
    metadata.emplace_back("split.tensors.count", io::GgufValue::scalar(static_cast<int32_t>(num_tensors)));
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (int64_t i = num_tensors * part / count; i < num_tensors * (part + 1) / count; ++i) {
      const std::string& name = file->tensors()[static_cast<size_t>(i)].name;
      kept.push_back(file->get(name));
      tensors.push_back({name, kept.back().view});
    }
    paths.push_back(io::GgufPartName{stem, part + 1, count}.of(part + 1));
    io::write_gguf(paths.back(), metadata, tensors);
  }
  return paths;
}

}  // namespace eadem::test
