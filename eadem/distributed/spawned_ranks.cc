// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/spawned_ranks.h"

#include <fcntl.h>
#include <spawn.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>

namespace eadem::distributed {

namespace {

constexpr int kDescriptor = 3;  // of the group, in a rank; those of further groups follow

// What a rank's process is made with.
class SpawnSettings {
 public:
  explicit SpawnSettings(const std::vector<int>& descriptors) {
    const int end = kDescriptor + static_cast<int>(descriptors.size());
    posix_spawn_file_actions_init(&files_);
    for (int to = kDescriptor; to < end; ++to) {
      // Copies behind all that a rank gets, so that none is overwritten before it is copied in the rank.
      copies_.push_back(fcntl(descriptors[static_cast<size_t>(to - kDescriptor)], F_DUPFD_CLOEXEC, end));
      if (copies_.back() < 0) throw IoError("the descriptor of a group cannot be copied: {}", std::strerror(errno));
      posix_spawn_file_actions_adddup2(&files_, copies_.back(), to);
    }
    posix_spawn_file_actions_addclosefrom_np(&files_, end);
    posix_spawnattr_init(&attributes_);
    // A rank leaves these to its parent once it has settled; until then they wait. Others have their usual effect.
    sigset_t left_to_parent, all;
    sigemptyset(&left_to_parent);
    sigaddset(&left_to_parent, SIGINT);
    sigaddset(&left_to_parent, SIGTERM);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &left_to_parent);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&files_);
    posix_spawnattr_destroy(&attributes_);
    for (const int copy : copies_) close(copy);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  pid_t start(std::vector<std::string> command, int rank, int size) const {
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    pid_t process = 0;
    if (const int error = posix_spawn(&process, arguments[0], &files_, &attributes_, arguments.data(), environ))
      throw IoError("{}: the process of rank {} of {} cannot be made: {}", command[0], rank, size,
                    std::strerror(error));
    return process;
  }

 private:
  posix_spawn_file_actions_t files_{};
  posix_spawnattr_t attributes_{};
  std::vector<int> copies_;
};

int number(const char* what, const std::string& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    throw InvalidArgument("the {} of a rank is '{}'; expected a number", what, text);
  return value;
}

}  // namespace

SpawnedRanks::SpawnedRanks(int size, const std::vector<std::string>& command, ProcessGroupOptions options,
                           std::vector<ProcessGroup*> others)
    : RankProcesses(size, options, others) {
  if (command.empty()) throw InvalidArgument("{} ranks are to run a program, and none is given", size);
  std::vector<int> descriptors = {group().descriptor()};
  for (const ProcessGroup* other : others) descriptors.push_back(other->descriptor());
  const SpawnSettings settings(descriptors);
  const std::string parent = std::to_string(getpid());
  start_on_thread([&](int rank) {
    std::vector<std::string> own = command;
    own.insert(own.end(), {std::to_string(kDescriptor), std::to_string(rank), parent});
    return settings.start(std::move(own), rank, size);
  });
}

void live_as_spawned_rank(const std::string& descriptor, const std::string& rank, const std::string& parent,
                          const RankBody& body) {
  ProcessGroup group = ProcessGroup::open(number("descriptor", descriptor));
  live_as_rank(group, number("rank", rank), number("parent", parent), body);
}

}  // namespace eadem::distributed
