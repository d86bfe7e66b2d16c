// SPDX-License-Identifier: Apache-2.0
//
// The tokenizer files of the shared data, unpacked once per test program into a temporary directory.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace eadem::io {

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "eadem-tokenizer-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Empty when the shared data is not there; then the test skips.
inline std::filesystem::path shared_tokenizers() {
  static const TemporaryDirectory directory;
  static const std::filesystem::path path = [] {
    const std::filesystem::path archive = std::filesystem::path(EADEM_SHARED_DATA) / "tokenizers.tar.zst";
    if (!std::filesystem::exists(archive)) return std::filesystem::path();
    const std::string command =
        "tar --zstd -xf '" + archive.string() + "' -C '" + directory.path().string() + "' 2>/dev/null";
    if (std::system(command.c_str()) != 0) return std::filesystem::path();
    return directory.path() / "tokenizers";
  }();
  return path;
}

inline std::filesystem::path wiki_path() {
  return std::filesystem::path(EADEM_SHARED_DATA) / "corpora/wikitext2/wiki.test.raw";
}

#define EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS() \
  if (shared_tokenizers().empty() || !std::filesystem::exists(wiki_path())) GTEST_SKIP() << "no shared data"

// llama2-hf/tokenizer.json of the shared data has plain spaces where four tokens and three merges need U+00A0.
inline std::string repaired_llama2_json() {
  std::string json = read_text(shared_tokenizers() / "llama2-hf/tokenizer.json");
  const std::string n = "\xC2\xA0", mark = "\xE2\x96\x81";
  const std::pair<std::string, std::string> edits[] = {
      {"\"  \": 8655", "\"" + n + n + "\": 8655"},
      {"\"    \": 17891", "\"" + n + n + n + n + "\": 17891"},
      {"\"" + mark + " \": 20246", "\"" + mark + n + "\": 20246"},
      {"\" \": 30081", "\"" + n + "\": 30081"},
      {"\"   \"", "\"" + n + " " + n + "\""},
      {"\"     \"", "\"" + n + n + " " + n + n + "\""},
      {"\"" + mark + "  \"", "\"" + mark + " " + n + "\""},
  };
  for (const auto& [from, to] : edits) {
    const size_t at = json.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    if (at != std::string::npos) json.replace(at, from.size(), to);
  }
  return json;
}

}  // namespace eadem::io
