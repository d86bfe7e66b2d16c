// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/output_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "eadem/core/error.h"

namespace eadem::train {

OutputLock::OutputLock(const std::string& directory, const Logger& log) {
  const std::string path = (std::filesystem::path(directory) / "lock").string();
  // O_NONBLOCK: opening a FIFO of this name must not wait.
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (descriptor_ < 0) throw IoError("cannot open {}: {}", path, std::strerror(errno));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    std::array<char, 256> holder{};
    const ssize_t length = ::pread(descriptor_, holder.data(), holder.size(), 0);
    const std::string_view text(holder.data(), length > 0 ? static_cast<size_t>(length) : 0);
    if (reason == EWOULDBLOCK) {
      ::close(descriptor_);
      throw IoError("{}: another run is writing there: {}", directory,
                    text.empty() ? "it has not said which" : text.substr(0, text.find('\n')));
    }
    log.log(LogLevel::warning, "{}: no lock can be had ({}): nothing keeps a second run out of this directory", path,
            std::strerror(reason));
    return;
  }
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  const std::string text = fmt::format("process {} on {}\n", ::getpid(), host.data());
  if (::ftruncate(descriptor_, 0) != 0 ||
      ::pwrite(descriptor_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    const int reason = errno;
    ::close(descriptor_);
    throw IoError("cannot write {}: {}", path, std::strerror(reason));
  }
}

OutputLock::~OutputLock() { ::close(descriptor_); }

}  // namespace eadem::train
