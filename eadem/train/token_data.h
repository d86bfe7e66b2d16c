// SPDX-License-Identifier: Apache-2.0
//
// Tokenized texts on disk, memory-mapped, and the order in which training reads them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "eadem/train/texts.h"

namespace eadem::train {

// Documents of token ids in one file: a header, the end of each document (u64), the ids (u32). Little endian.
class TokenFile {
 public:
  // Opens `path` if it holds these texts, encoded by this tokenizer, and is undamaged (compared by hashes). Otherwise
  // tokenizes the texts and writes the file atomically. Every document begins with the tokenizer's prefix (BOS) and
  // ends with `eos`. `progress(done, total)` counts bytes of text. Throws NotFound, IoError, DataCorrupted (a line that
  // is not JSON), InvalidArgument (not UTF-8, with the file and the offset; no document).
  static TokenFile open_or_make(const std::string& path, const Texts& texts, const io::Tokenizer& tokenizer,
                                const std::string& tokenizer_hash, int32_t eos,
                                const std::function<void(int64_t, int64_t)>& progress = {});

  // The XXH3 hash of each text, in their order.
  const std::vector<std::string>& text_hashes() const { return text_hashes_; }

  int64_t num_documents() const { return static_cast<int64_t>(ends_.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(ids_.size()); }
  int64_t text_bytes() const { return text_bytes_; }
  std::span<const uint32_t> document(int64_t index) const;

 private:
  TokenFile(std::shared_ptr<const io::MappedFile> file, const std::string& path);

  std::shared_ptr<const io::MappedFile> file_;
  std::span<const uint64_t> ends_;
  std::span<const uint32_t> ids_;
  int64_t text_bytes_ = 0;
  std::vector<std::string> text_hashes_;
};

// The packed pieces of documents of one pass, as the training graph takes them.
struct Batch {
  std::vector<int32_t> token_ids;    // [tokens]
  std::vector<int32_t> positions;    // [tokens] within the piece
  std::vector<int32_t> labels;       // [tokens] the next token of the document; -1 at its end
  std::vector<int32_t> query_start;  // [pieces + 1]
  std::vector<int32_t> lengths;      // [pieces]
  int64_t num_labels = 0;            // labels that are not -1
};

// The position of a loader; part of a checkpoint.
struct DataCursor {
  int64_t epoch = 0;
  int64_t document = 0;  // in the epoch's order
  int64_t offset = 0;    // tokens of it that were used
  friend bool operator==(const DataCursor&, const DataCursor&) = default;
};

// Fills batches with documents in an order that is shuffled anew each epoch, a pure function of (seed, epoch). Pieces
// are at most `sequence_length` tokens; a batch has exactly `batch_tokens`.
class DataLoader {
 public:
  DataLoader(const TokenFile& file, int64_t batch_tokens, int64_t sequence_length, uint64_t seed);

  void next(Batch& batch);
  const DataCursor& cursor() const { return cursor_; }
  void seek(const DataCursor& cursor);  // throws DataCorrupted when it lies outside the data

 private:
  void shuffle();

  const TokenFile& file_;
  int64_t batch_tokens_;
  int64_t sequence_length_;
  uint64_t seed_;
  DataCursor cursor_;
  std::vector<int64_t> order_;
};

// Appends one piece of a document, tokens [begin, end) with their labels, to a batch.
void append_piece(Batch& batch, std::span<const uint32_t> document, int64_t begin, int64_t end);
void clear(Batch& batch);

}  // namespace eadem::train
