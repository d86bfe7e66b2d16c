// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "eadem/core/error.h"

namespace eadem::io {

namespace {

// A file descriptor that closes itself.
struct OpenFile {
  int descriptor = -1;
  size_t size = 0;
  FileIdentity identity;

  ~OpenFile() {
    if (descriptor >= 0) ::close(descriptor);
  }
};

FileIdentity identity_of(const struct stat& status) {
  const auto nanoseconds = [](const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
  return {.size = static_cast<uint64_t>(status.st_size),
          .device = status.st_dev,
          .inode = status.st_ino,
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim)};
}

void open_regular_file(OpenFile& file, const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer before we can see that it is one.
  file.descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.descriptor < 0) {
    const int reason = errno;
    if (reason == ENOENT || reason == ENOTDIR) throw NotFound("{}: {}", path, std::strerror(reason));
    throw IoError("cannot open {}: {}", path, std::strerror(reason));
  }
  struct stat status {};
  if (::fstat(file.descriptor, &status) != 0) throw IoError("cannot stat {}: {}", path, std::strerror(errno));
  if (S_ISDIR(status.st_mode)) throw IoError("cannot read {}: it is a directory, expected a file", path);
  if (!S_ISREG(status.st_mode)) throw IoError("cannot read {}: it is not a regular file", path);
  file.size = static_cast<size_t>(status.st_size);
  file.identity = identity_of(status);
}

}  // namespace

MappedFile::MappedFile(std::string path, const FileIdentity& identity, const std::byte* data, size_t size)
    : path_(std::move(path)), identity_(identity), data_(data), size_(size) {}

bool MappedFile::is_unchanged() const {
  struct stat status {};
  return ::stat(path_.c_str(), &status) == 0 && identity_of(status) == identity_;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release(std::span<const std::byte> part) const {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(part.data()) + kPage - 1) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(part.data() + part.size()) / kPage * kPage;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  OpenFile file;
  open_regular_file(file, path);
  const std::byte* data = nullptr;
  if (file.size > 0) {
    void* mapped = ::mmap(nullptr, file.size, PROT_READ, MAP_PRIVATE, file.descriptor, 0);
    if (mapped == MAP_FAILED) throw IoError("cannot map {} ({} bytes): {}", path, file.size, std::strerror(errno));
    data = static_cast<const std::byte*>(mapped);
  }
  return std::shared_ptr<const MappedFile>(new MappedFile(path, file.identity, data, file.size));
}

std::string read_file(const std::string& path, int64_t max_bytes) {
  OpenFile file;
  open_regular_file(file, path);
  if (file.size > static_cast<size_t>(max_bytes))
    throw DataCorrupted("{} has {} bytes; at most {} are accepted for this kind of file", path, file.size, max_bytes);
  std::string content(file.size, '\0');
  size_t num_read = 0;
  while (num_read < content.size()) {
    const ssize_t count = ::read(file.descriptor, content.data() + num_read, content.size() - num_read);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw IoError("cannot read {}: {}", path, std::strerror(errno));
    if (count == 0) throw IoError("cannot read {}: it shrank from {} to {} bytes", path, content.size(), num_read);
    num_read += static_cast<size_t>(count);
  }
  return content;
}

}  // namespace eadem::io
