// SPDX-License-Identifier: Apache-2.0
//
// Ctrl-C (SIGINT) and SIGTERM. The first signal asks the running command to stop, at the latest after the current step
// of a model (training finishes its step and saves it). The second one ends the program by the signal's default action.
#pragma once

#include <atomic>

#include "eadem/core/error.h"

namespace eadem::cli {

// Listens from now on; to be called before long work. The signal handler sets the flag that is returned.
const std::atomic<bool>& listen_for_interrupt();
// The flag of listen_for_interrupt(), for the steps of an engine to check.
const std::atomic<bool>& interrupt_flag();
inline bool interrupted() { return interrupt_flag().load(); }
// A file descriptor that is readable while the flag is set, so that poll() misses no signal.
int interrupt_event();
// Forgets a Ctrl-C that was answered, so that the next one counts as the first again. Returns false, and forgets
// nothing, if SIGTERM was received: the program must end.
bool take_back_interrupt();
// Throws Cancelled when the user asked to stop.
inline void stop_if_interrupted() {
  if (interrupted()) throw Cancelled("interrupted");
}

}  // namespace eadem::cli
