// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interrupt.h"

#include <csignal>

namespace eadem::cli {

namespace {

// A signal handler has nothing but globals to write to.
std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void on_signal(int signal) {
  if (stop_requested.exchange(true)) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

const std::atomic<bool>& listen_for_interrupt() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a blocked read returns
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return stop_requested;
}

const std::atomic<bool>& interrupt_flag() { return stop_requested; }

}  // namespace eadem::cli
