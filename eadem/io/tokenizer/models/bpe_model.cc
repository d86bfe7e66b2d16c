// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/models/bpe_model.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

bool is_one_char(std::string_view text) {
  return !text.empty() && static_cast<size_t>(next_utf8(text, 0).length) == text.size();
}

// Whether a merge puts another character before U+2581.
bool joins_metaspace_to_others(const TokenizerSpec& spec) {
  std::unordered_map<int32_t, std::string_view> texts;
  texts.reserve(spec.vocab.size() + spec.extra_symbols.size());
  for (const VocabEntry& entry : spec.vocab) texts.emplace(entry.id, entry.text);
  for (size_t i = 0; i < spec.extra_symbols.size(); ++i)
    texts.emplace(kMaxVocab + static_cast<int32_t>(i), spec.extra_symbols[i]);
  return std::any_of(spec.merges.begin(), spec.merges.end(), [&](const Merge& merge) {
    return texts.at(merge.right).starts_with(kMetaspace) && !texts.at(merge.left).ends_with(kMetaspace);
  });
}

}  // namespace

const MergeTable::Entry MergeTable::kMissing{};

MergeTable::MergeTable(const std::vector<Merge>& merges) {
  const size_t size = std::bit_ceil(std::max<size_t>(merges.size() * 2, 2));
  slots_.resize(size);
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (const Merge& merge : merges) {
    const uint64_t pair = key(merge.left, merge.right);
    size_t slot = slot_of(pair);
    while (slots_[slot].pair != UINT64_MAX && slots_[slot].pair != pair) slot = (slot + 1) & mask_;
    // A pair listed twice keeps its last entry, as a map built in file order would.
    slots_[slot] = {pair, merge.rank, merge.result};
  }
}

BpeModel::BpeModel(const TokenizerSpec& spec, bool byte_level)
    : source_(spec.source),
      merges_(spec.merges),
      byte_level_(byte_level),
      ignore_merges_(spec.ignore_merges),
      fuse_unk_(spec.fuse_unk),
      extra_symbols_(spec.extra_symbols) {
  byte_ids_.fill(-1);
  ascii_ids_.fill(-1);
  std::string bytes;
  if (ignore_merges_) whole_pieces_.reserve(spec.vocab.size());
  for (const VocabEntry& entry : spec.vocab) {
    if (!spec.unk_token.empty() && entry.text == spec.unk_token) unk_id_ = entry.id;
    if (byte_level_) {
      constexpr size_t kLongestLetter = 2;  // bytes of a letter of the alphabet
      if (!ignore_merges_ && entry.text.size() > kLongestLetter) continue;
      if (!bytes_from_alphabet(bytes, entry.text)) continue;
      if (bytes.size() == 1) byte_ids_[static_cast<unsigned char>(bytes[0])] = entry.id;
      if (ignore_merges_) whole_pieces_.emplace(bytes, entry.id);
    } else {
      if (is_one_char(entry.text)) symbols_.emplace(entry.text, entry.id);
      if (ignore_merges_) whole_pieces_.emplace(entry.text, entry.id);
    }
  }
  if (!spec.unk_token.empty() && unk_id_ < 0) {
    throw DataCorrupted("{}: model.unk_token '{}' is not in the vocabulary", source_, spec.unk_token);
  }
  for (size_t i = 0; i < extra_symbols_.size(); ++i) {
    symbols_.emplace(extra_symbols_[i], kMaxVocab + static_cast<int32_t>(i));
  }
  if (!byte_level_) {
    for (int c = 0; c < 128; ++c) {
      const char text = static_cast<char>(c);
      if (const auto found = symbols_.find(std::string_view(&text, 1)); found != symbols_.end()) {
        ascii_ids_[static_cast<size_t>(c)] = found->second;
      }
    }
  }
  if (spec.byte_fallback) {
    if (byte_level_ && std::count(byte_ids_.begin(), byte_ids_.end(), -1) > 0) {
      throw Unsupported("{}: byte_fallback with a byte-level vocabulary that lacks some of the 256 bytes", source_);
    }
    if (!byte_level_) {
      // Some vocabularies lack tokens of bytes; a character with such a byte is unknown.
      const std::vector<int32_t> ids = byte_token_ids(spec);
      std::copy(ids.begin(), ids.end(), byte_ids_.begin());
    }
  }
  splits_at_metaspace_ =
      !byte_level_ && !ignore_merges_ && symbols_.contains(kMetaspace) && !joins_metaspace_to_others(spec);
}

// Writes symbols as the Hugging Face library does: an unknown token is held back until the next symbol that the
// vocabulary has, so that the bytes of characters between come before it; with fuse_unk one stands for all of them.
class BpeModel::SymbolWriter {
 public:
  SymbolWriter(const BpeModel& model, std::vector<int32_t>& ids) : model_(model), ids_(ids) {}

  void known(int32_t id) {
    finish();
    ids_.push_back(id);
  }
  void unknown(std::string_view text) {
    const auto has_token = [this](char byte) { return model_.byte_ids_[static_cast<unsigned char>(byte)] >= 0; };
    if (!model_.byte_level_ && std::all_of(text.begin(), text.end(), has_token)) {
      for (const char byte : text) ids_.push_back(model_.byte_ids_[static_cast<unsigned char>(byte)]);
      return;
    }
    if (model_.unk_id_ < 0) {
      std::string bytes;
      for (const char byte : text) bytes += fmt::format(" {:02X}", static_cast<unsigned>(static_cast<uint8_t>(byte)));
      throw InvalidArgument(
          "{}: the character{} has no token, and the vocabulary has neither tokens of its bytes nor an unknown token",
          model_.source_, bytes);
    }
    hold_back();
  }
  // The unknown token, of a character that was found to be unknown before.
  void hold_back() {
    if (pending_ && !model_.fuse_unk_) ids_.push_back(model_.unk_id_);
    pending_ = true;
  }
  void finish() {
    if (pending_) ids_.push_back(model_.unk_id_);
    pending_ = false;
  }

 private:
  const BpeModel& model_;
  std::vector<int32_t>& ids_;
  bool pending_ = false;
};

void BpeModel::start_symbols(std::string_view piece, std::vector<int32_t>& ids, TextWork& work) const {
  SymbolWriter writer(*this, ids);
  for (size_t pos = 0; pos < piece.size();) {
    work.tick();
    const auto byte = static_cast<unsigned char>(piece[pos]);
    size_t length = 1;
    int32_t id = -1;
    if (byte_level_) {
      id = byte_ids_[byte];
    } else if (byte < 128) {
      id = ascii_ids_[byte];
    } else {
      length = static_cast<size_t>(decode_valid_utf8(piece.data() + pos).length);
      if (const auto found = symbols_.find(piece.substr(pos, length)); found != symbols_.end()) id = found->second;
    }
    if (id >= 0) {
      writer.known(id);
    } else {
      writer.unknown(piece.substr(pos, length));
    }
    pos += length;
  }
  writer.finish();
}

// The lowest rank wins, the leftmost of equals: a scan per merge over at most kShortPiece ranks.
void BpeModel::merge_short(Scratch& s) const {
  size_t n = s.ids.size();
  const auto rank_at = [&](size_t i) {
    return i + 1 < n ? merges_.find(s.ids[i], s.ids[i + 1]).rank : MergeTable::kNoRank;
  };
  s.ranks.resize(n);
  for (size_t i = 0; i < n; ++i) s.ranks[i] = rank_at(i);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (s.ranks[i] < s.ranks[best]) best = i;
    }
    if (s.ranks[best] == MergeTable::kNoRank) break;
    s.ids[best] = merges_.find(s.ids[best], s.ids[best + 1]).result;
    std::copy(s.ids.begin() + static_cast<ptrdiff_t>(best) + 2, s.ids.begin() + static_cast<ptrdiff_t>(n),
              s.ids.begin() + static_cast<ptrdiff_t>(best) + 1);
    std::copy(s.ranks.begin() + static_cast<ptrdiff_t>(best) + 2, s.ranks.begin() + static_cast<ptrdiff_t>(n),
              s.ranks.begin() + static_cast<ptrdiff_t>(best) + 1);
    --n;
    s.ranks[best] = rank_at(best);
    if (best > 0) s.ranks[best - 1] = rank_at(best - 1);
  }
  s.ids.resize(n);
}

// A linked list of symbols and a heap of (rank, position). A heap entry whose rank is no longer the
// rank at its position is stale and skipped.
void BpeModel::merge_long(Scratch& s, TextWork& work) const {
  const auto n = static_cast<int32_t>(s.ids.size());
  s.ranks.assign(s.ids.size(), MergeTable::kNoRank);
  s.previous.resize(s.ids.size());
  s.next.resize(s.ids.size());
  s.heap.clear();
  const auto at = [](auto& values, int32_t i) -> auto& { return values[static_cast<size_t>(i)]; };
  const auto update = [&](int32_t i) {
    const int32_t right = at(s.next, i);
    at(s.ranks, i) = right < n ? merges_.find(at(s.ids, i), at(s.ids, right)).rank : MergeTable::kNoRank;
  };
  const auto entry = [&](int32_t i) { return static_cast<uint64_t>(at(s.ranks, i)) << 32 | static_cast<uint32_t>(i); };
  for (int32_t i = 0; i < n; ++i) {
    at(s.previous, i) = i - 1;
    at(s.next, i) = i + 1;
    update(i);
    if (at(s.ranks, i) != MergeTable::kNoRank) s.heap.push_back(entry(i));
  }
  std::make_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  const auto push = [&](int32_t i) {
    update(i);
    if (at(s.ranks, i) == MergeTable::kNoRank) return;
    s.heap.push_back(entry(i));
    std::push_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  };
  while (!s.heap.empty()) {
    work.tick();
    const uint64_t top = s.heap.front();
    std::pop_heap(s.heap.begin(), s.heap.end(), std::greater<>());
    s.heap.pop_back();
    const auto i = static_cast<int32_t>(top & UINT32_MAX);
    if (at(s.ranks, i) != static_cast<uint32_t>(top >> 32)) continue;
    const int32_t right = at(s.next, i);
    at(s.ids, i) = merges_.find(at(s.ids, i), at(s.ids, right)).result;
    at(s.ids, right) = -1;
    at(s.ranks, right) = MergeTable::kNoRank;
    at(s.next, i) = at(s.next, right);
    if (at(s.next, i) < n) at(s.previous, at(s.next, i)) = i;
    push(i);
    if (at(s.previous, i) >= 0) push(at(s.previous, i));
  }
  std::erase(s.ids, -1);
}

void BpeModel::encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids, TextWork& work) const {
  if (ignore_merges_) {
    if (const auto found = whole_pieces_.find(piece); found != whole_pieces_.end()) {
      ids.push_back(found->second);
      return;
    }
  }
  scratch.ids.clear();
  start_symbols(piece, scratch.ids, work);
  if (scratch.ids.size() <= kShortPiece) {
    merge_short(scratch);
  } else {
    merge_long(scratch, work);
  }
  if (extra_symbols_.empty()) {
    ids.insert(ids.end(), scratch.ids.begin(), scratch.ids.end());
    return;
  }
  SymbolWriter writer(*this, ids);
  for (const int32_t id : scratch.ids) {
    if (id == unk_id_ && fuse_unk_) {
      writer.hold_back();
    } else if (id < kMaxVocab) {
      writer.known(id);
    } else {
      writer.unknown(extra_symbols_[static_cast<size_t>(id - kMaxVocab)]);
    }
  }
  writer.finish();
}

}  // namespace eadem::io
