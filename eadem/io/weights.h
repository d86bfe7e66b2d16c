// SPDX-License-Identifier: Apache-2.0
//
// Named tensors from a file, whatever its format.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eadem/core/tensor.h"

namespace eadem::io {

class MappedFile;

struct WeightInfo {
  std::string name;
  std::string type_name;           // the name in the format: "BF16", "Q4_K"
  std::optional<WeightType> type;  // nothing when `get` cannot give it
  Shape shape;                     // logical, row-major: a linear weight is [out, in] in every format
  int64_t size_bytes = 0;          // stored bytes
};

// A file, or files, whose headers were checked when it was opened: every size and range below is proven. Immutable
// afterwards, so every call may run concurrently.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;

  // The file to name in messages.
  const std::string& path() const { return path_; }

  // In the order of the file's header.
  std::span<const WeightInfo> tensors() const { return tensors_; }
  // Null when no tensor has that name.
  const WeightInfo* find(std::string_view name) const;

  // The tensor, without a copy: it shares ownership of the mapping and must not be written to. (It is copied when
  // the file placed it at an address that is not aligned for its dtype.) Throws NotFound, or Unsupported for a type
  // that has no dtype; both name the file and the tensor.
  Tensor get(std::string_view name) const;

  // Its bytes as they lie in the file, u8 [size_bytes], for types that have no dtype here: int8, 8-bit floats. Throws
  // NotFound.
  Tensor get_bytes(std::string_view name) const;

  // Says that the tensor has been read and will not be soon again, so that a mapped file and what was made of it need
  // not both be in memory. Does nothing where the file is not mapped, or there is no such tensor.
  virtual void release(std::string_view name) const = 0;

  // The files that it reads, headers and all; none where the bytes are borrowed.
  virtual std::vector<std::shared_ptr<const MappedFile>> files() const = 0;

 protected:
  explicit WeightSource(std::string path) : path_(std::move(path)) {}

  // Called once by the derived class's loader. Throws DataCorrupted when a name occurs twice.
  void set_tensors(std::vector<WeightInfo> tensors);
  virtual Tensor load(size_t index) const = 0;
  virtual Tensor load_bytes(size_t index) const = 0;

 private:
  const WeightInfo& require(std::string_view name) const;

  std::string path_;
  std::vector<WeightInfo> tensors_;
  std::unordered_map<std::string_view, size_t> index_of_;  // keys view the names in tensors_
};

// Opens what `path` holds:
//   a directory     its model.safetensors, or the shards of its model.safetensors.index.json, or its only *.gguf, or
//   the
//                   parts of its only split GGUF
//   a file          by content: GGUF (also any part of a split one, with the others), safetensors, or a safetensors
//   index
// Throws NotFound, IoError, DataCorrupted, or Unsupported (PyTorch pickles, GGML files older than GGUF); says what was
// found and what can be opened.
std::shared_ptr<const WeightSource> open_weights(const std::string& path);

// A tensor to be written: on the host, plain and contiguous.
struct NamedTensor {
  std::string name;
  TensorView view;
};

}  // namespace eadem::io
