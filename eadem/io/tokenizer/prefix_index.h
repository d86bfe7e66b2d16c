// SPDX-License-Identifier: Apache-2.0
//
// PrefixIndex: the tokens that a text begins with.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::io {

// Immutable once it is built, and safe to share.
class PrefixIndex {
 public:
  // Tokens are words at most. Longer ones would make time quadratic in the text.
  static constexpr size_t kMaxTokenBytes = 1024;

  struct Entry {
    std::string text;
    int32_t id;
    double score;
  };

  PrefixIndex() = default;
  // Texts are unique. Throws Unsupported, naming `source`, for one of more than kMaxTokenBytes; empty ones are left
  // out.
  PrefixIndex(std::vector<Entry> entries, const std::string& source);

  // Calls found(entry) for each token that `text`, which is not empty, begins with, the shortest first. Entries that
  // agree with the text so far are a range, which each byte narrows; in it the one that ends here, if any, comes first.
  template <typename Found>
  void each(std::string_view text, Found found) const {
    const auto byte_at = [](const Entry& entry, size_t at) { return static_cast<unsigned char>(entry.text[at]); };
    const auto first = static_cast<unsigned char>(text[0]);
    auto begin = entries_.begin() + static_cast<ptrdiff_t>(first_byte_[first]);
    auto end = entries_.begin() + static_cast<ptrdiff_t>(first_byte_[first + size_t{1}]);
    for (size_t length = 1; begin != end; ++length) {
      if (begin->text.size() == length) {
        found(*begin);
        ++begin;
      }
      if (length == text.size()) return;
      const auto next = static_cast<unsigned char>(text[length]);
      begin = std::partition_point(begin, end, [&](const Entry& entry) { return byte_at(entry, length) < next; });
      end = std::partition_point(begin, end, [&](const Entry& entry) { return byte_at(entry, length) == next; });
    }
  }

 private:
  std::vector<Entry> entries_;            // ascending texts
  std::array<size_t, 257> first_byte_{};  // entries that begin with byte b: [first_byte_[b], first_byte_[b + 1])
};

}  // namespace eadem::io
