// SPDX-License-Identifier: Apache-2.0
//
// A pack file: parts of bytes that were made from other files, to be mapped instead of being made again.
//
//   0    header, 128 bytes, little endian
//          0 "eadempak"  8 u32 version  12 u32 0  16 u64 bytes of the index  24 u64 parts  32 u64 begin of the data
//          40 u64 bytes of the file  48 u128 source  64 u128 parts' checksum  80 zeros
//          112 u128 checksum of bytes 0 … 111 and the index
//   128  index: a line of text for each part, "OFFSET BYTES DESCRIPTION\n", offsets from the begin of the data
//        zeros up to a multiple of 4096
//        data: each part begins at a multiple of 4096
//
// Whoever opens one states the parts that are wanted: the index that they imply must be there byte for byte, so that
// nothing in a file decides what is read where. `source` is the hash of what the parts were made from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "eadem/io/files/content_hash.h"
#include "eadem/io/files/mapped_file.h"

namespace eadem::io {

struct PackPart {
  std::string description;  // one line; says everything that decides what the bytes are, but for the source
  int64_t size_bytes = 0;
};

class PackFile {
 public:
  // Throws NotFound, IoError, or DataCorrupted: not such a file, of another version, truncated, damaged in its header,
  // or with other parts; names what was found and what was expected. The data is not read.
  static std::shared_ptr<const PackFile> open(const std::string& path, std::span<const PackPart> parts);
  // Reads a file from memory that `owner` keeps alive.
  static std::shared_ptr<const PackFile> parse(const std::string& path, std::span<const std::byte> bytes,
                                               std::shared_ptr<const void> owner, std::span<const PackPart> parts);

  const ContentHash& source() const { return source_; }
  // Changes with everything but the data, and with that through its checksum.
  const ContentHash& checksum() const { return checksum_; }
  // Page aligned if the file is.
  std::span<const std::byte> part(size_t index) const { return parts_[index]; }
  // Reads all the data: whether it is what was written.
  bool data_is_intact(ParallelFor parallel_for) const;
  // Null for borrowed bytes.
  const MappedFile* mapping() const { return mapping_.get(); }

 private:
  PackFile() = default;

  std::shared_ptr<const void> owner_;
  std::shared_ptr<const MappedFile> mapping_;
  ContentHash source_, data_checksum_, checksum_;
  std::vector<std::span<const std::byte>> parts_;
};

// Writes one atomically (atomic_file.h); `data` holds the bytes of each part. Throws IoError. Returns its
// `checksum`.
ContentHash write_pack_file(const std::string& path, std::span<const PackPart> parts, const ContentHash& source,
                            std::span<const std::span<const std::byte>> data, ParallelFor parallel_for);

}  // namespace eadem::io
