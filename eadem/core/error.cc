// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/error.h"

#include <cstdio>
#include <cstdlib>

namespace eadem::detail {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: internal error: %s: %s\n", file, line, condition, message.c_str());
  std::abort();
}

}  // namespace eadem::detail
