// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/models/word_piece_model.h"

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/text.h"

namespace eadem::io {

WordPieceModel::WordPieceModel(const TokenizerSpec& spec) : max_chars_(spec.max_word_chars) {
  std::vector<PrefixIndex::Entry> first, next;
  for (const VocabEntry& entry : spec.vocab) {
    const std::string_view text = entry.text, prefix = spec.continuing_prefix;
    if (text == spec.unk_token) unk_id_ = entry.id;
    first.push_back({entry.text, entry.id, 0});
    if (text.starts_with(prefix)) next.push_back({std::string(text.substr(prefix.size())), entry.id, 0});
  }
  first_ = PrefixIndex(std::move(first), spec.source);
  next_ = PrefixIndex(std::move(next), spec.source);
  if (unk_id_ < 0)
    throw DataCorrupted("{}: model.unk_token {} is not in the vocabulary", spec.source, quote(spec.unk_token));
}

void WordPieceModel::encode(std::string_view piece, Scratch&, std::vector<int32_t>& ids, TextWork& work) const {
  const auto is_start = [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; };
  const size_t before = ids.size();
  bool written = static_cast<size_t>(std::count_if(piece.begin(), piece.end(), is_start)) <= max_chars_;
  for (size_t pos = 0; written && pos < piece.size();) {
    work.tick();
    const PrefixIndex::Entry* longest = nullptr;
    (pos == 0 ? first_ : next_).each(piece.substr(pos), [&](const PrefixIndex::Entry& entry) { longest = &entry; });
    written = longest != nullptr;
    if (!written) break;
    ids.push_back(longest->id);
    pos += longest->text.size();
  }
  if (written) return;
  ids.resize(before);
  ids.push_back(unk_id_);
}

}  // namespace eadem::io
