// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/prefix_index.h"

#include "eadem/core/error.h"

namespace eadem::io {

PrefixIndex::PrefixIndex(std::vector<Entry> entries, const std::string& source) : entries_(std::move(entries)) {
  std::erase_if(entries_, [](const Entry& entry) { return entry.text.empty(); });
  for (const Entry& entry : entries_)
    if (entry.text.size() > kMaxTokenBytes)
      throw Unsupported("{}: token {} has {} bytes; at most {} are supported", source, entry.id, entry.text.size(),
                        kMaxTokenBytes);
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
  for (const Entry& entry : entries_) ++first_byte_[static_cast<unsigned char>(entry.text[0]) + size_t{1}];
  for (size_t byte = 0; byte < 256; ++byte) first_byte_[byte + 1] += first_byte_[byte];
}

}  // namespace eadem::io
