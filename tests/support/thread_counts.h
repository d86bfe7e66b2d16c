// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace eadem::test {

/// Of the numbers of threads on which a kernel must give the same bits, those to try: with a sanitizer the last alone.
/// Bits are compared by other builds, and what one thread writes and reads, several do.
inline std::vector<int> thread_counts(const std::vector<int>& all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {all.back()};
#else
  return all;
#endif
}

}  // namespace eadem::test
