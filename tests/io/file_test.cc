// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/files/sha256.h"
#include "eadem/io/text.h"
#include "test_files.h"

namespace eadem::io {
namespace {

TEST(MappedFile, GivesTheBytes) {
  const ScratchDirectory scratch;
  const std::string path = scratch.write("a", "hello");
  std::shared_ptr<const MappedFile> file = MappedFile::open(path);
  EXPECT_EQ(file->path(), path);
  ASSERT_EQ(file->size(), 5u);
  EXPECT_EQ(std::memcmp(file->data(), "hello", 5), 0);
  // The mapping outlives the name.
  std::filesystem::remove(path);
  EXPECT_EQ(file->bytes()[4], std::byte{'o'});
  EXPECT_EQ(MappedFile::open(scratch.write("empty", ""))->size(), 0u);
}

TEST(MappedFile, NamesPathAndReason) {
  const ScratchDirectory scratch;
  expect_error<NotFound>([&] { MappedFile::open(scratch.file("none")); }, {scratch.file("none"), "No such file"});
  expect_error<NotFound>([&] { MappedFile::open(scratch.write("a", "") + "/b"); }, {"a/b", "Not a directory"});
  expect_error<IoError>([&] { MappedFile::open(scratch.path()); }, {scratch.path(), "is a directory"});
  ASSERT_EQ(::mkfifo(scratch.file("fifo").c_str(), 0600), 0);
  expect_error<IoError>([&] { MappedFile::open(scratch.file("fifo")); }, {"fifo", "not a regular file"});
  if (::geteuid() != 0) {
    const std::string path = scratch.write("secret", "x");
    ::chmod(path.c_str(), 0);
    expect_error<IoError>([&] { MappedFile::open(path); }, {path, "Permission denied"});
  }
}

TEST(ReadFile, ChecksTheSize) {
  const ScratchDirectory scratch;
  const std::string path = scratch.write("a", "12345");
  EXPECT_EQ(read_file(path, 5), "12345");
  expect_error<DataCorrupted>([&] { read_file(path, 4); }, {path, "5 bytes", "at most 4"});
  expect_error<NotFound>([&] { read_file(path + "x", 4); }, {path + "x"});
}

TEST(AtomicFile, ReplacesOnCommitOnly) {
  const ScratchDirectory scratch;
  const std::string path = scratch.write("a", "old");
  const std::string large(700'000, 'x');
  {
    AtomicFile file(path);
    file.write("new");
    file.write(large);
    file.write("end");
    EXPECT_EQ(content_of(path), "old");
    file.commit();
    EXPECT_EQ(content_of(path), "new" + large + "end");
  }
  { AtomicFile(path).write("abandoned"); }
  EXPECT_EQ(content_of(path), "new" + large + "end");
  EXPECT_EQ(scratch.names(), std::vector<std::string>{"a"});
}

TEST(AtomicFile, TwoWritersOfOnePathStayApart) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("a");
  AtomicFile first(path);
  AtomicFile second(path);
  first.write("first");
  second.write("second");
  second.commit();
  first.commit();
  EXPECT_EQ(content_of(path), "first");
}

TEST(AtomicFile, FullDiskKeepsTheOldFile) {
  const ScratchDirectory scratch;
  const std::string path = scratch.write("a", "old");
  // A limit on file size stands in for a full disk: write fails half-way with EFBIG instead of ENOSPC.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limited = before;
  limited.rlim_cur = 300'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limited), 0);
  expect_error<IoError>([&] { write_file_atomically(path, std::string(1'000'000, 'x')); },
                        {"cannot write", path, "File too large"});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(content_of(path), "old");
  EXPECT_EQ(scratch.names(), std::vector<std::string>{"a"});
}

TEST(AtomicFile, UnwritablePlaces) {
  const ScratchDirectory scratch;
  expect_error<IoError>([&] { write_file_atomically(scratch.file("none/a"), "x"); },
                        {"cannot write", scratch.file("none/a"), "No such file or directory"});
  const std::string file = scratch.write("file", "");
  expect_error<IoError>([&] { write_file_atomically(file + "/a", "x"); }, {file + "/a", "Not a directory"});
  // Renaming over a directory fails, and leaves no temporary file behind.
  std::filesystem::create_directory(scratch.file("directory"));
  expect_error<IoError>([&] { write_file_atomically(scratch.file("directory"), "x"); }, {"directory", "rename"});
  EXPECT_EQ(scratch.names().size(), 2u);
}

// FIPS 180-4 examples and lengths around the padding's edges; expected values from coreutils' sha256sum.
TEST(Sha256, KnownDigests) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(std::string(55, 'a')), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(sha256_hex(std::string(56, 'a')), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(sha256_hex(std::string(64, 'a')), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  EXPECT_EQ(sha256_hex(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheSameDigest) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (size_t first = 0; first <= 130; ++first) {
    Sha256 hash;
    hash.update(std::string_view(text).substr(0, first));
    hash.update(std::string_view(text).substr(first, 3));
    hash.update(std::string_view(text).substr(first + 3));
    EXPECT_EQ(hash.hex_digest(), sha256_hex(text)) << first;
  }
}

TEST(Sha256, OfAFile) {
  const ScratchDirectory scratch;
  EXPECT_EQ(sha256_hex_of_file(scratch.write("a", "abc")), sha256_hex("abc"));
  expect_error<NotFound>([&] { sha256_hex_of_file(scratch.file("b")); }, {"b"});
}

TEST(Text, Utf8) {
  for (const char* valid : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                            "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "grüße €😀"})
    EXPECT_TRUE(is_valid_utf8(valid)) << valid;
  for (const char* invalid : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2\x41", "\xe0\x9f\xbf", "\xe0\xa0",
                              "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf0\x90\x80", "\xf4\x90\x80\x80", "\xf5", "\xff"})
    EXPECT_FALSE(is_valid_utf8(invalid)) << quote(invalid);
}

TEST(Text, QuoteIsPrintable) {
  EXPECT_EQ(quote("layers.0"), "'layers.0'");
  EXPECT_EQ(quote("a\nb\xff"), "'a\\x0ab\\xff'");
  const std::string cut = quote(std::string(1000, 'x'));
  EXPECT_LT(cut.size(), 160u);
  EXPECT_NE(cut.find("(1000 bytes)"), std::string::npos);
}

}  // namespace
}  // namespace eadem::io
