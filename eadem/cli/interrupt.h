// SPDX-License-Identifier: Apache-2.0
//
// Ctrl-C (SIGINT) and SIGTERM: the first asks the running command to stop, within a step of a model that runs (training
// finishes its step and saves it), the second ends the program as if nobody listened.
#pragma once

#include <atomic>

#include "eadem/core/error.h"

namespace eadem::cli {

// Listens from here on; call it before long work. The flag is set by the signal handler.
const std::atomic<bool>& listen_for_interrupt();
// That flag, for the steps of an engine to look at.
const std::atomic<bool>& interrupt_flag();
inline bool interrupted() { return interrupt_flag().load(); }
// A file descriptor that is readable while the flag is set, so that poll() misses no signal.
int interrupt_event();
// Forgets a Ctrl-C that has been answered, so that the next one is a first one again. False, and nothing forgotten,
// when SIGTERM asked: the program is to end.
bool take_back_interrupt();
// Throws Cancelled when the user asked to stop.
inline void stop_if_interrupted() {
  if (interrupted()) throw Cancelled("interrupted");
}

}  // namespace eadem::cli
