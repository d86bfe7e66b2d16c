// SPDX-License-Identifier: Apache-2.0
//
// Any bytes either are refused as a pack file or are one with exactly the parts that were asked for, all of which can
// be read. The same bytes again as the begin of a file of the right size, with a header that matches its checksum,
// which no chance would give.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/io/pack_file.h"

namespace {

using eadem::io::PackFile;
using eadem::io::PackPart;

const std::vector<PackPart> kParts = {
    {"eadem, rank 0 of 1", 0}, {"w f32 [4, 3] as q8_0 in panels: quants u8 [1, 1, 12]", 12}, {"v f32 [2] as f32", 8}};
constexpr size_t kFileBytes = 4096 + 4096 + 8;

const auto in_order = [](int64_t count, eadem::FunctionRef<void(int64_t)> task) {
  for (int64_t i = 0; i < count; ++i) task(i);
};

void read_all(const std::string& bytes, const std::vector<PackPart>& parts) {
  try {
    const auto file = PackFile::parse("input", std::as_bytes(std::span<const char>(bytes)), nullptr, parts);
    file->data_is_intact(in_order);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (file->part(i).size() != static_cast<size_t>(parts[i].size_bytes)) __builtin_trap();
      for (const volatile std::byte& byte : file->part(i)) static_cast<void>(byte);
    }
  } catch (const eadem::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  read_all(bytes, kParts);
  read_all(bytes, {});
  if (size < 128) return 0;
  bytes.resize(std::max<size_t>(size, kFileBytes));
  const uint64_t file_bytes = bytes.size();
  std::memcpy(bytes.data() + 40, &file_bytes, sizeof file_bytes);
  uint64_t index_bytes = 0;
  std::memcpy(&index_bytes, bytes.data() + 16, sizeof index_bytes);
  index_bytes = std::min<uint64_t>(index_bytes, bytes.size() - 128);
  const std::string covered = bytes.substr(0, 112) + bytes.substr(128, index_bytes);
  const eadem::io::ContentHash checksum = eadem::io::content_hash(std::as_bytes(std::span<const char>(covered)));
  std::memcpy(bytes.data() + 112, &checksum, sizeof checksum);
  read_all(bytes, kParts);
  read_all(bytes, {});
  return 0;
}
