// SPDX-License-Identifier: Apache-2.0
//
// safetensors: an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
//
// The header is checked in full when a file is opened: a known dtype's size must equal its range, ranges must lie in
// the file and cover the data without hole or overlap, and there may be no trailing bytes.
// Source: github.com/huggingface/safetensors, README "Format".
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/weight_writer.h"
#include "eadem/io/weights.h"

namespace eadem::io {

class SafetensorsFile : public WeightSource {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;

  // Throws NotFound, IoError, DataCorrupted, or Unsupported (rank).
  static std::shared_ptr<const SafetensorsFile> open(const std::string& path);
  static std::shared_ptr<const SafetensorsFile> open(const std::shared_ptr<const MappedFile>& mapping);
  // Reads a file from memory that `owner` keeps alive; `path` is for messages.
  static std::shared_ptr<const SafetensorsFile> parse(const std::string& path, std::span<const std::byte> bytes,
                                                      std::shared_ptr<const void> owner);

  // __metadata__, in the order of the file.
  const Metadata& metadata() const { return metadata_; }

  void release(std::string_view name) const override;
  std::vector<std::shared_ptr<const MappedFile>> files() const override;

 private:
  SafetensorsFile(const std::string& path, std::span<const std::byte> bytes, std::shared_ptr<const void> owner);
  Tensor load(size_t index) const override;
  Tensor load_bytes(size_t index) const override;

  std::shared_ptr<const void> owner_;
  std::shared_ptr<const MappedFile> mapping_;  // null when the bytes are borrowed
  Metadata metadata_;
  std::vector<std::span<const std::byte>> data_;  // a view per tensor, in the order of tensors()
};

// Opens every shard that a model.safetensors.index.json names, all in its own directory. The index and the shards
// must agree: each indexed tensor is in its shard, and no shard holds a tensor that the index does not place there.
std::shared_ptr<const WeightSource> open_sharded_safetensors(const std::string& index_path);

// Writes the tensors in the given order, atomically (atomic_file.h). Throws InvalidArgument for names, types or views
// that cannot be written, IoError for the rest.
std::unique_ptr<WeightWriter> begin_safetensors(const std::string& path, std::span<const TensorHeader> tensors,
                                                const SafetensorsFile::Metadata& metadata = {});
// Writes a whole file from tensors in memory. Throws as begin_safetensors does.
void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const SafetensorsFile::Metadata& metadata = {});

}  // namespace eadem::io
