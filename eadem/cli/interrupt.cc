// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interrupt.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

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

// write(2) is one of the few calls that a handler may make; when nobody reads, there is nobody to tell.
void say(std::string_view text) {
  const int interrupted_errno = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  errno = interrupted_errno;
}

std::atomic<int> signals_while_saving{0};

void on_signal_while_saving(int signal) {
  stop_requested = true;
  if (signal == SIGHUP) return;  // shells and the system may both send one, and nobody asks for haste with it
  switch (signals_while_saving.fetch_add(1)) {
    case 0: return;
    case 1: say("\neadem: stopping once the step is saved; another signal ends at once and loses it\n"); return;
    default:
      say("\neadem: ended at once; nothing was saved since the last checkpoint\n");
      std::signal(signal, SIG_DFL);
      std::raise(signal);
  }
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a blocked read returns
  sigaction(signal, &action, nullptr);
}

}  // namespace

const std::atomic<bool>& listen_for_interrupt() {
  handle(SIGINT, on_signal);
  handle(SIGTERM, on_signal);
  return stop_requested;
}

const std::atomic<bool>& listen_for_interrupt_and_save() {
  handle(SIGINT, on_signal_while_saving);
  handle(SIGTERM, on_signal_while_saving);
  // `nohup` has it ignored: such a run is to outlive its terminal.
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) handle(SIGHUP, on_signal_while_saving);
  // Whoever reads our messages may be stopped by the same Ctrl-C; that must not end us before we have saved.
  std::signal(SIGPIPE, SIG_IGN);
  return stop_requested;
}

const std::atomic<bool>& interrupt_flag() { return stop_requested; }

}  // namespace eadem::cli
