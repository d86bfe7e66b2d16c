// SPDX-License-Identifier: Apache-2.0
//
// Byte-pair encoding of one piece: start from one symbol per byte (byte-level) or per character, and
// merge the adjacent pair of lowest rank, leftmost first, until no pair merges.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/models/token_model.h"

namespace eadem::io {

// The merges as an open-addressing table from (left, right) to (rank, result).
class MergeTable {
 public:
  static constexpr uint32_t kNoRank = UINT32_MAX;
  struct Entry {
    uint64_t pair = UINT64_MAX;
    uint32_t rank = kNoRank;
    int32_t result = -1;
  };

  explicit MergeTable(const std::vector<Merge>& merges);
  // The entry of a pair; rank kNoRank if it does not merge.
  const Entry& find(int32_t left, int32_t right) const {
    const uint64_t pair = key(left, right);
    for (size_t slot = slot_of(pair);; slot = (slot + 1) & mask_) {
      const Entry& entry = slots_[slot];
      if (entry.pair == pair) return entry;
      if (entry.pair == UINT64_MAX) return kMissing;
    }
  }

 private:
  static const Entry kMissing;
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t slot_of(uint64_t pair) const { return static_cast<size_t>(pair * 0x9E3779B97F4A7C15u >> shift_); }

  std::vector<Entry> slots_;
  size_t mask_ = 0;
  int shift_ = 63;
};

class BpeModel final : public TokenModel {
 public:
  // `byte_level`: pieces are raw bytes and token texts are in the byte alphabet.
  // Throws DataCorrupted or Unsupported naming the file and the entry.
  BpeModel(const TokenizerSpec& spec, bool byte_level);

  // Pieces of up to kShortPiece symbols scan an array (they are nearly all pieces of real text); longer
  // ones use a heap: O(n log n).
  void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids, TextWork& work) const override;

  // No merge joins a symbol that begins with U+2581 to one on its left that does not end with it, so a
  // text may be cut before each U+2581 that follows another character without changing any id.
  bool splits_at_metaspace() const override { return splits_at_metaspace_; }

 private:
  class SymbolWriter;
  void start_symbols(std::string_view piece, std::vector<int32_t>& ids, TextWork& work) const;
  void merge_short(Scratch& s) const;
  void merge_long(Scratch& s, TextWork& work) const;

  static constexpr size_t kShortPiece = 48;

  std::string source_;
  MergeTable merges_;
  bool byte_level_, ignore_merges_, fuse_unk_;
  int32_t unk_id_ = -1;
  bool splits_at_metaspace_ = false;
  std::array<int32_t, 256> byte_ids_;       // byte-level: the byte's token; byte fallback: its <0xNN> token; or -1
  std::array<int32_t, 128> ascii_ids_;      // not byte-level: symbols of ASCII characters
  StringMap<int32_t> symbols_;              // not byte-level: single characters to symbols
  StringMap<int32_t> whole_pieces_;         // ignore_merges: pieces that are tokens
  std::vector<std::string> extra_symbols_;  // see TokenizerSpec
};

}  // namespace eadem::io
