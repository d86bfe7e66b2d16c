// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interrupt.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

namespace eadem::cli {

namespace {

// A signal handler can only write to globals.
std::atomic<bool> stop_requested{false};
std::atomic<bool> end_requested{false};  // by SIGTERM
std::atomic<int> event{-1};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void on_signal(int signal) {
  if (signal == SIGTERM) end_requested = true;
  if (stop_requested.exchange(true)) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  const int saved = errno;
  eventfd_write(event, 1);
  errno = saved;
}

}  // namespace

const std::atomic<bool>& listen_for_interrupt() {
  if (event < 0) event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (event < 0) throw IoError("eventfd: {}", std::strerror(errno));
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a blocked read returns
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return stop_requested;
}

const std::atomic<bool>& interrupt_flag() { return stop_requested; }

int interrupt_event() { return event; }

bool take_back_interrupt() {
  if (end_requested) return false;
  eventfd_t count = 0;
  eventfd_read(event, &count);
  stop_requested = false;
  return true;
}

}  // namespace eadem::cli
