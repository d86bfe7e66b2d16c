// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace eadem::cli {

// All of standard input. Throws InvalidArgument when it holds more than `max_bytes`, Cancelled when the user asked to
// stop (listen_for_interrupt() is called before).
std::string read_stdin(int64_t max_bytes);

}  // namespace eadem::cli
