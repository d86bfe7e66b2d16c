// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/stop_and_save.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

namespace eadem::cli {

namespace {

// A signal handler can only write to globals.
std::atomic<bool> save_requested{false};
std::atomic<int> num_requests{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

// write(2) is one of the few calls that a handler may make. Its failure is ignored, because it could not be reported.
void say(std::string_view text) {
  const int interrupted_errno = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  errno = interrupted_errno;
}

void on_save_signal(int signal) {
  save_requested = true;
  if (signal == SIGHUP) return;  // shells and the system may both send one, so a second one is no request to hurry
  switch (num_requests.fetch_add(1)) {
    case 0: return;
    case 1: say("\neadem: stopping once the step is saved; another signal ends at once and loses it\n"); return;
    default:
      say("\neadem: ended at once; nothing was saved since the last checkpoint\n");
      std::signal(signal, SIG_DFL);
      std::raise(signal);
  }
}

}  // namespace

const std::atomic<bool>& listen_for_stop_and_save() {
  struct sigaction action {};
  action.sa_handler = on_save_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a blocked read returns
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  return save_requested;
}

}  // namespace eadem::cli
