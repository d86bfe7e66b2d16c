// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/models/unigram_model.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {

UnigramModel::UnigramModel(const TokenizerSpec& spec)
    : source_(spec.source), unk_score_(spec.unk_score), single_precision_(spec.single_precision) {
  EADEM_CHECK(spec.scores.size() == spec.vocab.size(), "{} scores of {} tokens", spec.scores.size(), spec.vocab.size());
  std::vector<PrefixIndex::Entry> entries;
  for (size_t i = 0; i < spec.vocab.size(); ++i) {
    const VocabEntry& entry = spec.vocab[i];
    if (!spec.unk_token.empty() && entry.text == spec.unk_token) unk_id_ = entry.id;
    if (!std::isnan(spec.scores[i])) entries.push_back({entry.text, entry.id, spec.scores[i]});
  }
  tokens_ = PrefixIndex(std::move(entries), source_);
  if (spec.byte_fallback) byte_ids_ = byte_token_ids(spec);
}

void UnigramModel::append(std::string_view text, int32_t id, std::vector<int32_t>& ids) const {
  if (id != unk_id_) {
    ids.push_back(id);
    return;
  }
  const auto has_token = [this](char byte) { return byte_ids_[static_cast<unsigned char>(byte)] >= 0; };
  if (!byte_ids_.empty() && std::all_of(text.begin(), text.end(), has_token)) {
    for (const char byte : text) ids.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
  } else {
    ids.push_back(id);
  }
}

void UnigramModel::encode(std::string_view piece, Scratch& s, std::vector<int32_t>& ids, TextWork& work) const {
  // For each byte that a token may end before: where the best last token begins, its id, and the score of the path.
  s.previous.assign(piece.size() + 1, -1);
  s.ids.assign(piece.size() + 1, unk_id_);
  s.scores.assign(piece.size() + 1, 0);
  const auto offer = [&](size_t begin, size_t end, int32_t id, double score) {
    double total = s.scores[begin] + score;
    if (single_precision_) total = static_cast<float>(total);
    if (s.previous[end] >= 0 && total <= s.scores[end]) return;
    s.previous[end] = static_cast<int32_t>(begin);
    s.ids[end] = id;
    s.scores[end] = total;
  };
  for (size_t pos = 0; pos < piece.size();) {
    work.tick();
    const auto length = static_cast<size_t>(decode_valid_utf8(piece.data() + pos).length);
    bool has_char = false;
    tokens_.each(piece.substr(pos), [&](const PrefixIndex::Entry& entry) {
      offer(pos, pos + entry.text.size(), entry.id, entry.score);
      has_char = has_char || entry.text.size() == length;
    });
    if (!has_char) {
      if (unk_id_ < 0)
        throw InvalidArgument("{}: the character {} has no token, and the vocabulary has no unknown token", source_,
                              quote(piece.substr(pos, length)));
      offer(pos, pos + length, unk_id_, unk_score_);
    }
    pos += length;
  }
  // Backwards along the best path; then what is unknown in a row is one.
  s.next.clear();
  for (int32_t end = static_cast<int32_t>(piece.size()); end > 0; end = s.previous[static_cast<size_t>(end)])
    s.next.push_back(end);
  size_t unknown = 0;  // where a run of it begins
  for (size_t i = s.next.size(), begin = 0; i-- > 0;) {
    const auto end = static_cast<size_t>(s.next[i]);
    const bool known = s.ids[end] != unk_id_;
    if (known && unknown != begin) append(piece.substr(unknown, begin - unknown), unk_id_, ids);
    if (known) append(piece.substr(begin, end - begin), s.ids[end], ids);
    if (known) unknown = end;
    begin = end;
  }
  if (unknown != piece.size()) append(piece.substr(unknown), unk_id_, ids);
}

}  // namespace eadem::io
