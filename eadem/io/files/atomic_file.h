// SPDX-License-Identifier: Apache-2.0
//
// Writing files so that a reader, a crash or a full disk never meets half of one.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace eadem::io {

// Writes to a temporary file beside `path` and renames it over `path` on commit. Until commit() returns the old
// file stays as it was; without commit() the destructor removes the temporary file. (Only a killed process leaves one
// behind, named PATH.PID-N.tmp.)
//
// Every call throws IoError naming the path and the system's reason (no space, no permission, …). Not
// thread-safe; two writers of one path do not disturb each other, and the last to commit wins.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  // Flushes to the disk (fsync), renames, and flushes the directory. Call once, last.
  void commit();

 private:
  void flush();
  void write_through(std::span<const std::byte> bytes);

  std::string path_;
  std::string temporary_path_;
  std::string buffer_;  // joins small writes
  int descriptor_ = -1;
};

// One whole file, atomically.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace eadem::io
