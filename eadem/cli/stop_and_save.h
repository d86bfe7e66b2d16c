// SPDX-License-Identifier: Apache-2.0
//
// Signal handling of a command that saves its work before it stops.
#pragma once

#include <atomic>

namespace eadem::cli {

// Ctrl-C (SIGINT), SIGTERM and a closed terminal (SIGHUP, unless it is ignored, as under nohup) set the flag from here
// on: the command is to stop soon and to save what it has. A second SIGINT or SIGTERM says on stderr that this is under
// way; a third says that nothing was saved, and ends the program. SIGPIPE is ignored: whoever reads our messages may be
// stopped by the same Ctrl-C, which must not end us before we have saved.
const std::atomic<bool>& listen_for_stop_and_save();

}  // namespace eadem::cli
