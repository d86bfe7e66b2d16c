// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/options/standard_input.h"

#include <iostream>

#include "eadem/cli/interrupt.h"

namespace eadem::cli {

std::string read_stdin(int64_t max_bytes) {
  std::string text;
  char buffer[65536];
  while (std::cin.read(buffer, sizeof buffer) || std::cin.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(std::cin.gcount()));
    if (static_cast<int64_t>(text.size()) > max_bytes)
      throw InvalidArgument("standard input holds more than {} bytes", max_bytes);
    stop_if_interrupted();
  }
  stop_if_interrupted();
  return text;
}

}  // namespace eadem::cli
