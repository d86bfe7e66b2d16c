// SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4), to name files and checkpoints by content. Plain scalar code, a few hundred MB/s.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace eadem::io {

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text) { update(std::as_bytes(std::span(text))); }
  // 64 lower-case hexadecimal digits. Call once, last.
  std::string hex_digest();

 private:
  void compress(const std::byte* block);

  std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> block_{};
  uint64_t num_bytes_ = 0;
};

std::string sha256_hex(std::span<const std::byte> bytes);
std::string sha256_hex(std::string_view text);

// The hash of a regular file's content. Throws NotFound or IoError.
std::string sha256_hex_of_file(const std::string& path);

}  // namespace eadem::io
