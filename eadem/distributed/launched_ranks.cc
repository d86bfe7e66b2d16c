// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/launched_ranks.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace eadem::distributed {

namespace {

using Clock = std::chrono::steady_clock;

std::optional<int> launcher_number(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end != '\0' || value < 0)
    throw InvalidArgument("the launcher set {} to '{}'; expected a number", name, text);
  return value;
}

// A socket with a name that no file has.
class LauncherSocket {
 public:
  LauncherSocket() : descriptor_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (descriptor_ < 0) throw IoError("a socket for the ranks of a launcher: {}", std::strerror(errno));
    address_.sun_family = AF_UNIX;
    const std::string name = fmt::format("eadem ranks of process {}", getppid());
    std::memcpy(address_.sun_path + 1, name.data(), name.size());
    length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  explicit LauncherSocket(int descriptor) : descriptor_(descriptor) {}
  ~LauncherSocket() { close(descriptor_); }
  LauncherSocket(const LauncherSocket&) = delete;
  LauncherSocket& operator=(const LauncherSocket&) = delete;

  int descriptor() const { return descriptor_; }
  bool bind_and_listen() { return bind(descriptor_, address(), length_) == 0 && listen(descriptor_, SOMAXCONN) == 0; }
  bool connect_to_rank_0() { return connect(descriptor_, address(), length_) == 0; }
  // Whether this user runs the process at the other end: anybody can use a name.
  bool is_ours() const {
    ucred peer{};
    socklen_t size = sizeof peer;
    return getsockopt(descriptor_, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == getuid();
  }

 private:
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&address_); }

  int descriptor_;
  sockaddr_un address_{};
  socklen_t length_ = 0;
};

// A message of one byte and room for a descriptor.
struct DescriptorMessage {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  DescriptorMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
};

bool send_descriptor(int socket, int descriptor) {
  DescriptorMessage message;
  cmsghdr* const part = CMSG_FIRSTHDR(&message.header);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
  return sendmsg(socket, &message.header, MSG_NOSIGNAL) == 1;
}

int receive_descriptor(int socket) {
  DescriptorMessage message;
  if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC) != 1) return -1;
  const cmsghdr* const part = CMSG_FIRSTHDR(&message.header);
  if (part == nullptr || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) return -1;
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(part), sizeof descriptor);
  return descriptor;
}

// Rank 0: gives the group to all others.
void give_out(const ProcessGroup& group, LauncherSocket& server, int others, Clock::time_point limit) {
  while (others > 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
    pollfd waiting{server.descriptor(), POLLIN, 0};
    const int ready = left <= 0 ? 0 : poll(&waiting, 1, static_cast<int>(left));
    if (ready == 0) throw RankFailed("{} of the ranks that the launcher started did not come", others);
    if (ready < 0) continue;  // a signal
    const int accepted = accept4(server.descriptor(), nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted < 0) continue;
    const LauncherSocket peer(accepted);
    if (peer.is_ours() && send_descriptor(peer.descriptor(), group.descriptor())) --others;
  }
}

// The others: the group that rank 0 has made, or will make.
ProcessGroup group_of_rank_0(Clock::time_point limit) {
  for (;;) {
    LauncherSocket socket;
    if (socket.connect_to_rank_0()) {
      if (!socket.is_ours()) throw RankFailed("another user's process says that it is rank 0");
      const int descriptor = receive_descriptor(socket.descriptor());
      if (descriptor < 0) throw RankFailed("rank 0 has ended");
      return ProcessGroup::open(descriptor);
    }
    if (Clock::now() > limit) throw RankFailed("rank 0 did not come");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

std::optional<Launch> launch_of_this_process() {
  const std::optional<int> rank = launcher_number("OMPI_COMM_WORLD_RANK"),
                           size = launcher_number("OMPI_COMM_WORLD_SIZE"),
                           local = launcher_number("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (!rank || !size) return std::nullopt;
  if (*rank >= *size) throw InvalidArgument("the launcher says that this is rank {} of {}", *rank, *size);
  if (local && *local != *size)
    throw Unsupported("the launcher started {} ranks, {} of them on this host; all must be on one", *size, *local);
  return Launch{*rank, *size};
}

LaunchedRanks::LaunchedRanks(const Launch& launch, const RankBody& body, ProcessGroupOptions options)
    : RankProcesses(launch.size, options) {
  const Clock::time_point limit =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.join_limit_s));
  if (launch.rank > 0) {
    const pid_t launcher = getppid();
    int status = 0;
    try {
      ProcessGroup given = group_of_rank_0(limit);
      live_as_rank(given, launch.rank, launcher, body);
    } catch (const Error&) {
      status = 1;  // rank 0 misses this one
    }
    _exit(status);
  }
  LauncherSocket server;
  if (!server.bind_and_listen())
    throw IoError("a socket for the ranks of process {}: {}", getppid(), std::strerror(errno));
  give_out(group(), server, launch.size - 1, limit);
  join_group();
}

}  // namespace eadem::distributed
