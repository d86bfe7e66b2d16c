// SPDX-License-Identifier: Apache-2.0
//
// Reading files: whole into memory (small documents) or mapped (weights).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace eadem::io {

// Identifies a file and its state without reading it: a write changes at least the time of change.
struct FileIdentity {
  uint64_t size = 0, device = 0, inode = 0;
  int64_t modified_ns = 0, changed_ns = 0;  // since 1970

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// A regular file mapped read-only; unmapped when the last owner goes. Immutable, so any thread may read it.
//
// The mapping follows the file: whoever truncates a model file in place while it is mapped takes the pages
// away from under us (SIGBUS). Eadem itself never does: it replaces files by rename (atomic_file.h).
class MappedFile {
 public:
  // Throws NotFound (no such file) or IoError (anything else, directories and devices included), naming the
  // path and the system's reason.
  static std::shared_ptr<const MappedFile> open(const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  // When it was opened.
  const FileIdentity& identity() const { return identity_; }
  // Whether `path` is still that file in that state.
  bool is_unchanged() const;
  const std::byte* data() const { return data_; }  // page aligned; null for an empty file
  size_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

  // Says that `part` of the file will not be read soon: its pages leave this process's memory, and come back from the
  // file if they are read after all.
  void release(std::span<const std::byte> part) const;

 private:
  MappedFile(std::string path, const FileIdentity& identity, const std::byte* data, size_t size);

  std::string path_;
  FileIdentity identity_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The content of a regular file of at most `max_bytes`. Throws NotFound or IoError as above, and DataCorrupted
// when the file is larger, naming both sizes.
std::string read_file(const std::string& path, int64_t max_bytes);

}  // namespace eadem::io
