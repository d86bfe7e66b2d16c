// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/pack_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "eadem/core/error.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/io/text.h"

namespace eadem::io {

namespace {

static_assert(std::endian::native == std::endian::little, "the header is written as it lies");

constexpr std::string_view kMagic = "eadempak";
constexpr uint32_t kVersion = 1;
constexpr uint64_t kAlignment = 4096;

struct Header {
  std::array<char, 8> magic{};
  uint32_t version = kVersion;
  uint32_t zero = 0;
  uint64_t index_bytes = 0, num_parts = 0, data_begin = 0, file_bytes = 0;
  ContentHash source, data;
  std::array<uint64_t, 4> zeros{};
  ContentHash checksum;
};
static_assert(sizeof(Header) == 128);

uint64_t aligned(uint64_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

// The places of the parts, and the index that states them. Offsets in the index count from the beginning of the data,
// because the length of the index depends on them.
struct PackLayout {
  std::string index;
  std::vector<uint64_t> offsets;  // counted from the beginning of the file
  uint64_t data_begin = 0, file_bytes = 0;
};

PackLayout layout_of(std::span<const PackPart> parts) {
  PackLayout layout;
  uint64_t end = 0;
  for (const PackPart& part : parts) {
    EADEM_CHECK(part.size_bytes >= 0 && part.description.find('\n') == std::string::npos, "{} bytes of '{}'",
                part.size_bytes, part.description);
    layout.offsets.push_back(aligned(end));
    end = layout.offsets.back() + static_cast<uint64_t>(part.size_bytes);
    layout.index += fmt::format("{} {} {}\n", layout.offsets.back(), part.size_bytes, part.description);
  }
  layout.data_begin = aligned(sizeof(Header) + layout.index.size());
  layout.file_bytes = layout.data_begin + end;
  for (uint64_t& offset : layout.offsets) offset += layout.data_begin;
  return layout;
}

ContentHash header_checksum(const Header& header, std::string_view index) {
  std::string bytes(offsetof(Header, checksum), '\0');
  std::memcpy(bytes.data(), &header, bytes.size());
  return content_hash(std::as_bytes(std::span<const char>(bytes.append(index))));
}

ContentHash data_checksum(std::span<const std::span<const std::byte>> parts, ParallelFor parallel_for) {
  std::vector<ContentHash> hashes;
  for (const auto& part : parts) hashes.push_back(content_hash(part, parallel_for));
  return content_hash(std::as_bytes(std::span(hashes)));
}

// The first line in which two indexes differ.
std::string difference(std::string_view found, std::string_view wanted) {
  while (true) {
    const std::string_view a = found.substr(0, found.find('\n')), b = wanted.substr(0, wanted.find('\n'));
    if (a != b || found.empty())
      return fmt::format("holds {} where {} is wanted", a.empty() ? "nothing" : quote(a),
                         b.empty() ? "nothing" : quote(b));
    found.remove_prefix(std::min(found.size(), a.size() + 1));
    wanted.remove_prefix(std::min(wanted.size(), b.size() + 1));
  }
}

}  // namespace

std::shared_ptr<const PackFile> PackFile::open(const std::string& path, std::span<const PackPart> parts) {
  const std::shared_ptr<const MappedFile> mapping = MappedFile::open(path);
  const std::shared_ptr<const PackFile> file = parse(path, mapping->bytes(), mapping, parts);
  const_cast<PackFile&>(*file).mapping_ = mapping;
  return file;
}

std::shared_ptr<const PackFile> PackFile::parse(const std::string& path, std::span<const std::byte> bytes,
                                                std::shared_ptr<const void> owner, std::span<const PackPart> parts) {
  // 1. The header: whose file it is, of which version, and whether it is whole.
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.substr(0, kMagic.size()) != kMagic)
    throw DataCorrupted("{} is no pack file (it begins with {})", path, quote(text.substr(0, kMagic.size())));
  if (bytes.size() < sizeof(Header))
    throw DataCorrupted("{} has {} bytes; its header alone takes {}", path, bytes.size(), sizeof(Header));
  Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.version != kVersion)
    throw DataCorrupted("{} has version {} of the format; this program reads version {}", path, header.version,
                        kVersion);
  if (header.file_bytes != bytes.size())
    throw DataCorrupted("{} has {} bytes; its header says {}", path, bytes.size(), header.file_bytes);
  if (header.index_bytes > bytes.size() - sizeof(Header))
    throw DataCorrupted("{}: an index of {} bytes does not fit a file of {}", path, header.index_bytes, bytes.size());
  const std::string_view index = text.substr(sizeof(Header), header.index_bytes);
  if (header_checksum(header, index) != header.checksum)
    throw DataCorrupted("{}: its header does not match its checksum", path);

  // 2. The parts: exactly those that are wanted.
  const PackLayout layout = layout_of(parts);
  if (index != layout.index) throw DataCorrupted("{} {}", path, difference(index, layout.index));
  if (header.num_parts != parts.size() || header.data_begin != layout.data_begin ||
      header.file_bytes != layout.file_bytes)
    throw DataCorrupted("{}: {} parts from byte {} in {} bytes; its index implies {} from {} in {}", path,
                        header.num_parts, header.data_begin, header.file_bytes, parts.size(), layout.data_begin,
                        layout.file_bytes);

  std::shared_ptr<PackFile> file(new PackFile);
  file->owner_ = std::move(owner);
  file->source_ = header.source;
  file->data_checksum_ = header.data;
  file->checksum_ = header.checksum;
  for (size_t i = 0; i < parts.size(); ++i)
    file->parts_.push_back(bytes.subspan(layout.offsets[i], static_cast<size_t>(parts[i].size_bytes)));
  return file;
}

bool PackFile::data_is_intact(ParallelFor parallel_for) const {
  return data_checksum(parts_, parallel_for) == data_checksum_;
}

ContentHash write_pack_file(const std::string& path, std::span<const PackPart> parts, const ContentHash& source,
                            std::span<const std::span<const std::byte>> data, ParallelFor parallel_for) {
  EADEM_CHECK(data.size() == parts.size(), "{} of {} parts", data.size(), parts.size());
  const PackLayout layout = layout_of(parts);
  Header header;
  std::copy(kMagic.begin(), kMagic.end(), header.magic.begin());
  header.index_bytes = layout.index.size();
  header.num_parts = parts.size();
  header.data_begin = layout.data_begin;
  header.file_bytes = layout.file_bytes;
  header.source = source;
  header.data = data_checksum(data, parallel_for);
  header.checksum = header_checksum(header, layout.index);

  AtomicFile file(path);
  uint64_t position = sizeof header + layout.index.size();
  const std::string zeros(kAlignment, '\0');
  file.write(std::as_bytes(std::span(&header, 1)));
  file.write(layout.index);
  for (size_t i = 0; i < parts.size(); ++i) {
    EADEM_CHECK(data[i].size() == static_cast<size_t>(parts[i].size_bytes), "{} bytes of '{}'", data[i].size(),
                parts[i].description);
    file.write(std::string_view(zeros).substr(0, layout.offsets[i] - position));
    file.write(data[i]);
    position = layout.offsets[i] + data[i].size();
  }
  if (parts.empty()) file.write(std::string_view(zeros).substr(0, layout.data_begin - position));
  file.commit();
  return header.checksum;
}

}  // namespace eadem::io
