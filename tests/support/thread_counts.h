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

/// Of the cases of a kernel, every so many are tried: all, but where a case takes ten times as long. What a sanitizer
/// looks for, races above all, is in the same places whatever the sizes and types.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kEveryCase = 8;
#elif defined(EADEM_EMULATED)
inline constexpr int64_t kEveryCase = 4;
#else
inline constexpr int64_t kEveryCase = 1;
#endif

/// Whether the case of that number is tried. Those that are stand irregularly, since types and shapes of cases take
/// turns.
constexpr bool tries_case(int64_t number) {
  return (static_cast<uint32_t>(number) * 2654435761u >> 16) % static_cast<uint32_t>(kEveryCase) == 0;
}

}  // namespace eadem::test
