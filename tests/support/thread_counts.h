// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace eadem::test {

/// The numbers of threads on which a kernel must give the same bits. With a sanitizer this is the largest alone: bits
/// are compared by other builds, and what one thread writes and reads, three do.
inline std::vector<int> thread_counts() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {3};
#else
  return {1, 2, 3};
#endif
}

}  // namespace eadem::test
