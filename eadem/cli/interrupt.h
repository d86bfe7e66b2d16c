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
// The same flag, for engine steps to look at.
const std::atomic<bool>& interrupt_flag();
inline bool interrupted() { return interrupt_flag().load(); }
// Throws Cancelled when the user asked to stop.
inline void stop_if_interrupted() {
  if (interrupted()) throw Cancelled("interrupted");
}

}  // namespace eadem::cli
