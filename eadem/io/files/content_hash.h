// SPDX-License-Identifier: Apache-2.0
//
// A fast 128-bit hash of large contents, for recognizing them again: against accident, not against malice (sha256.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "eadem/core/encoding.h"

namespace eadem::io {

struct ContentHash {
  uint64_t low = 0, high = 0;

  std::string hex() const;  // 32 digits
  friend bool operator==(const ContentHash&, const ContentHash&) = default;
};

// XXH3's 128-bit hash (github.com/Cyan4973/xxHash) of the bytes.
ContentHash content_hash(std::span<const std::byte> bytes);

// Hashes pieces of 1 MiB on all threads, then their hashes and the number of bytes. The result differs from that of the
// function above. Reads at the speed of memory.
ContentHash content_hash(std::span<const std::byte> bytes, ParallelFor parallel_for);

}  // namespace eadem::io
