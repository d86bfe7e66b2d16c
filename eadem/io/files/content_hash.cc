// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/files/content_hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <vector>

namespace eadem::io {

std::string ContentHash::hex() const { return fmt::format("{:016x}{:016x}", high, low); }

ContentHash content_hash(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

ContentHash content_hash(std::span<const std::byte> bytes, ParallelFor parallel_for) {
  constexpr size_t kPiece = 1 << 20;
  const size_t pieces = (bytes.size() + kPiece - 1) / kPiece;
  std::vector<ContentHash> hashes(pieces + 1);
  hashes[pieces] = {bytes.size(), 0};
  const auto task = [&](int64_t index) {
    const size_t begin = static_cast<size_t>(index) * kPiece;
    hashes[static_cast<size_t>(index)] = content_hash(bytes.subspan(begin, std::min(kPiece, bytes.size() - begin)));
  };
  parallel_for(static_cast<int64_t>(pieces), task);
  return content_hash(std::as_bytes(std::span(hashes)));
}

}  // namespace eadem::io
