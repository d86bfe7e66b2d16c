// SPDX-License-Identifier: Apache-2.0
//
// Helpers that the tests of eadem/io share: scratch directories, byte builders, and a check of an error's kind and
// words.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/core/tensor.h"

namespace eadem::io {

// A directory of its own for each test, removed afterwards.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "eadem_io_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }

  std::string path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }
  // Writes a file and returns its path.
  std::string write(std::string_view name, std::string_view content) const {
    std::ofstream(file(name), std::ios::binary) << content;
    return file(name);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      result.push_back(entry.path().filename().string());
    return result;
  }

 private:
  std::string path_;
};

inline std::string content_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Little-endian bytes of a scalar.
template <typename T>
std::string bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

inline std::string_view bytes_of_tensor(const TensorView& view) {
  const int64_t size =
      view.encoding == nullptr ? view.size_bytes() : view.encoding->planes(view.shape).at(0).size_bytes();
  return {static_cast<const char*>(view.data), static_cast<size_t>(size)};
}

// A copy of `text` in a heap block of exactly its size, so that a sanitizer sees a read past the end.
struct OwnedBytes {
  explicit OwnedBytes(std::string_view text) : block(new std::byte[text.size()]), size(text.size()) {
    if (size > 0) std::memcpy(block.get(), text.data(), size);
  }
  std::span<const std::byte> span() const { return {block.get(), size}; }

  std::shared_ptr<std::byte[]> block;
  size_t size;
};

// Runs `action` and expects an error of type E whose message holds every one of `words`.
template <typename E, typename Action>
void expect_error(Action&& action, std::initializer_list<std::string_view> words) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const E& error) {
    for (const std::string_view word : words)
      EXPECT_NE(std::string_view(error.what()).find(word), std::string_view::npos)
          << "'" << word << "' is not in: " << error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
  }
}

}  // namespace eadem::io
