// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace eadem::test {

/// Of the numbers of threads on which a kernel must give the same bits, those to try: with a sanitizer and where
/// programs are emulated (EADEM_EMULATED) the last alone. Bits are compared by other builds, and what one thread writes
/// and reads, several do.
inline std::vector<int> thread_counts(const std::vector<int>& all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(EADEM_EMULATED)
  return {all.back()};
#else
  return all;
#endif
}

/// Of the cases of a kernel, every so many are tried. Threads meet in the same places whatever the sizes and types, so
/// that a build which looks for races needs no more than a part; other builds try all.
#if defined(__SANITIZE_THREAD__)
inline constexpr int64_t kEveryCase = 8;
#else
inline constexpr int64_t kEveryCase = 1;
#endif

}  // namespace eadem::test
