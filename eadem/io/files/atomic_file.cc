// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/files/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "eadem/core/error.h"

namespace eadem::io {

namespace {

constexpr size_t kBufferBytes = 256 * 1024;

std::string directory_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

[[noreturn]] void fail(const std::string& path, const char* step, int reason) {
  throw IoError("cannot write {}: {}: {}", path, step, std::strerror(reason));
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  // The name is ours by O_EXCL; the process id and a counter keep concurrent writers apart.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    temporary_path_ = fmt::format("{}.{}-{}.tmp", path_, ::getpid(), attempt);
    descriptor_ = ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) return;
    if (errno != EEXIST && errno != EINTR) break;
  }
  fail(path_, "cannot create a temporary file beside it", errno);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_path_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  if (bytes.size() >= kBufferBytes) {
    flush();
    write_through(bytes);
    return;
  }
  buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (buffer_.size() >= kBufferBytes) flush();
}

void AtomicFile::flush() {
  write_through(std::as_bytes(std::span(buffer_)));
  buffer_.clear();
}

void AtomicFile::write_through(std::span<const std::byte> bytes) {
  EADEM_CHECK(descriptor_ >= 0, "{}: written after commit", path_);
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(path_, "write", errno);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void AtomicFile::commit() {
  flush();
  if (::fsync(descriptor_) != 0) fail(path_, "fsync", errno);
  // The temporary file is ours to remove until the rename has happened, so the descriptor stays open till then;
  // fsync has already reported what close could.
  if (::rename(temporary_path_.c_str(), path_.c_str()) != 0) fail(path_, "rename", errno);
  ::close(descriptor_);
  descriptor_ = -1;

  const std::string directory = directory_of(path_);
  const int directory_descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory_descriptor < 0) fail(path_, "cannot open its directory to flush it", errno);
  const int result = ::fsync(directory_descriptor);
  const int reason = errno;
  ::close(directory_descriptor);
  // Some file systems cannot flush a directory (EINVAL); there the rename is as durable as it gets.
  if (result != 0 && reason != EINVAL) fail(path_, "fsync of its directory", reason);
}

void write_file_atomically(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

}  // namespace eadem::io
