// SPDX-License-Identifier: Apache-2.0
//
// GGUF models that are split into several files, as llama.cpp's gguf-split and the `gguf` package write them:
//
//   NAME-00001-of-00003.gguf, NAME-00002-of-00003.gguf, …   in one directory
//
// Each part is a GGUF file with three keys: `split.no`, its number counted from 0, `split.count`, and
// `split.tensors.count`, the tensors of all parts together. The first part has the other metadata, and may have no
// tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "eadem/io/gguf.h"

namespace eadem::io {

// The name of a part: STEM-00001-of-00003.gguf.
struct GgufPartName {
  std::string stem;    // with the directories, if there were any
  int64_t number = 0;  // from 1 to count
  int64_t count = 0;

  // Nothing for another name.
  static std::optional<GgufPartName> parse(std::string_view name);
  // The name of another part of the same model.
  std::string of(int64_t other) const;
};

// Whether the file says that it is one of several parts.
bool is_gguf_part(const GgufFile& file);

// The model of which `part`, a file alone, is a part: the metadata of the first part without `split.*`, and the tensors
// of all, in their order. Throws NotFound for a part that is missing, and DataCorrupted for parts that contradict their
// names or one another; both name the file.
std::shared_ptr<const GgufFile> open_gguf_parts(const std::shared_ptr<const GgufFile>& part);

}  // namespace eadem::io
