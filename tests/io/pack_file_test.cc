// SPDX-License-Identifier: Apache-2.0
//
// Pack files: what was written is read, and any other byte in a header, an index or the data is noticed.
#include "eadem/io/pack_file.h"

#include <gtest/gtest.h>

#include "test_files.h"
#include "tests/support/refusal.h"

namespace eadem::io {
namespace {

using test::refusal;

const auto in_order = [](int64_t count, FunctionRef<void(int64_t)> task) {
  for (int64_t i = 0; i < count; ++i) task(i);
};

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span<const char>(text)); }

const std::vector<PackPart> kParts = {{"title", 0}, {"a [3]", 3}, {"b [5000]", 5000}, {"c", 0}, {"d", 4096}, {"e", 1}};
const ContentHash kSource{1, 2};

class PackFiles : public testing::Test {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < kParts.size(); ++i)
      data_.emplace_back(static_cast<size_t>(kParts[i].size_bytes), static_cast<char>('a' + i));
    checksum_ = write();
    content_ = read_file(path(), 1 << 20);
  }
  std::string path() const { return folder_.file("x.pack"); }
  ContentHash write() const {
    std::vector<std::span<const std::byte>> spans;
    for (const std::string& part : data_) spans.push_back(bytes_of(part));
    return write_pack_file(path(), kParts, kSource, spans, in_order);
  }
  static std::shared_ptr<const PackFile> parse(const std::string& content,
                                               const std::vector<PackPart>& parts = kParts) {
    const OwnedBytes bytes(content);
    return PackFile::parse("f", bytes.span(), bytes.block, parts);
  }

  ScratchDirectory folder_;
  std::vector<std::string> data_;
  ContentHash checksum_;
  std::string content_;
};

TEST_F(PackFiles, ReadsWhatWasWritten) {
  const auto file = PackFile::open(path(), kParts);
  EXPECT_EQ(file->source(), kSource);
  EXPECT_EQ(file->checksum(), checksum_);
  EXPECT_TRUE(file->data_is_intact(in_order));
  ASSERT_NE(file->mapping(), nullptr);
  EXPECT_TRUE(file->mapping()->is_unchanged());
  for (size_t i = 0; i < kParts.size(); ++i) {
    const auto part = file->part(i);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(part.data()), part.size()), data_[i]);
    if (!part.empty()) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(part.data()) % 4096, 0u);
    }
  }
  EXPECT_EQ(write(), checksum_);  // the same parts give the same file
  EXPECT_EQ(read_file(path(), 1 << 20), content_);
  EXPECT_FALSE(file->mapping()->is_unchanged());  // another inode
}

TEST_F(PackFiles, NoPartsAreAFile) {
  write_pack_file(path(), {}, kSource, {}, in_order);
  EXPECT_TRUE(PackFile::open(path(), {})->data_is_intact(in_order));
}

TEST_F(PackFiles, EveryBitOfTheHeaderAndTheIndexCounts) {
  const size_t end = content_.find("e\n") + 2;
  ASSERT_GT(end, 128u);
  for (size_t i = 0; i < end; ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = content_;
      changed[i] = static_cast<char>(changed[i] ^ 1 << bit);
      EXPECT_HAS(refusal([&] { parse(changed); }), "DataCorrupted: f");
    }
}

TEST_F(PackFiles, EveryByteOfTheDataCounts) {
  size_t counted = 0;
  for (const size_t p : {2, 4, 5}) {
    const size_t begin = content_.find(data_[p], 4096);
    for (size_t i = 0; i < data_[p].size(); i += 61, ++counted) {
      std::string changed = content_;
      changed[begin + i] ^= 1;
      EXPECT_FALSE(parse(changed)->data_is_intact(in_order)) << begin + i;
    }
  }
  EXPECT_GT(counted, 100u);
}

TEST_F(PackFiles, OtherSizesAreRefused) {
  for (size_t size = 0; size < content_.size(); size += size < 600 ? 1 : 97)
    EXPECT_HAS(refusal([&] { parse(content_.substr(0, size)); }), "DataCorrupted: f");
  const std::string said = refusal([&] { parse(content_ + "x"); });
  EXPECT_HAS(said, fmt::format("f has {} bytes; its header says {}", content_.size() + 1, content_.size()));
}

TEST_F(PackFiles, SaysWhatItIs) {
  EXPECT_HAS(refusal([&] { parse("GGUF and so on"); }), "f is no pack file (it begins with 'GGUF and')");
  EXPECT_HAS(refusal([&] { parse(""); }), "f is no pack file");
  std::string changed = content_;
  changed[8] = 9;
  EXPECT_HAS(refusal([&] { parse(changed); }), "version 9 of the format; this program reads version 1");
  EXPECT_HAS(refusal([&] { PackFile::open(folder_.file("absent"), kParts); }), "NotFound: ");
  EXPECT_HAS(refusal([&] { PackFile::open(folder_.path(), kParts); }), "IoError: ");
}

TEST_F(PackFiles, OnlyThePartsThatAreWanted) {
  std::vector<PackPart> parts = kParts;
  parts[1].description = "z [3]";
  EXPECT_HAS(refusal([&] { parse(content_, parts); }), "holds '0 3 a [3]' where '0 3 z [3]' is wanted");
  parts = kParts;
  parts[4].size_bytes = 4097;
  EXPECT_HAS(refusal([&] { parse(content_, parts); }), "holds '12288 4096 d' where '12288 4097 d' is wanted");
  parts = kParts;
  parts.pop_back();
  EXPECT_HAS(refusal([&] { parse(content_, parts); }), "holds '16384 1 e' where nothing is wanted");
  parts = kParts;
  parts.push_back({"more", 1});
  EXPECT_HAS(refusal([&] { parse(content_, parts); }), "holds nothing where '20480 1 more' is wanted");
}

TEST(ContentHash, OfOrderSizeAndContent) {
  std::string bytes(5 << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2654435761u >> 13);
  const ContentHash whole = content_hash(bytes_of(bytes), in_order);
  // Whichever order the pieces are hashed in.
  EXPECT_EQ(whole, content_hash(bytes_of(bytes), [](int64_t count, FunctionRef<void(int64_t)> task) {
              for (int64_t i = count; i-- > 0;) task(i);
            }));
  std::string changed = bytes;
  std::swap_ranges(changed.begin(), changed.begin() + (1 << 20), changed.begin() + (1 << 20));
  EXPECT_NE(whole, content_hash(bytes_of(changed), in_order));
  EXPECT_NE(whole, content_hash(bytes_of(bytes).subspan(1), in_order));
  EXPECT_NE(content_hash({}, in_order), content_hash(bytes_of(std::string(1, '\0')), in_order));
  // The vectors of xxHash 0.8: XXH3_128bits of nothing and of "a".
  EXPECT_EQ(content_hash({}).hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(content_hash(bytes_of("a")).hex(), "a96faf705af16834e6c632b61e964e1f");
}

}  // namespace
}  // namespace eadem::io
