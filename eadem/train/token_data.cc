// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/token_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "eadem/core/error.h"
#include "eadem/core/philox.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/content_hash.h"
#include "eadem/io/files/sha256.h"

namespace eadem::train {

namespace {

constexpr char kMagic[8] = {'E', 'A', 'D', 'E', 'M', 'T', 'O', 'K'};
constexpr uint32_t kVersion = 2;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint64_t num_documents;
  uint64_t num_tokens;
  uint64_t text_bytes;
  char source_hash[64];  // SHA-256, hexadecimal, over the tokenizer, how texts are read, and the texts
  char data_hash[32];    // XXH3, hexadecimal, over the hashes of the ends and of the ids
};
static_assert(sizeof(Header) == 136);

std::string data_hash(std::span<const std::byte> ends, std::span<const std::byte> ids) {
  const std::string both = io::content_hash(ends).hex() + io::content_hash(ids).hex();
  return io::content_hash(std::as_bytes(std::span(both))).hex();
}

// Whether `file` was made from these sources and is undamaged.
bool is_up_to_date(std::span<const std::byte> file, const std::string& source_hash) {
  Header header;
  if (file.size() < sizeof(header)) return false;
  std::memcpy(&header, file.data(), sizeof(header));
  const std::span<const std::byte> data = file.subspan(sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kVersion ||
      std::string_view(header.source_hash, 64) != source_hash || header.num_documents > data.size() / 8)
    return false;
  const size_t ends_bytes = header.num_documents * 8;
  return std::string_view(header.data_hash, 32) == data_hash(data.first(ends_bytes), data.subspan(ends_bytes));
}

}  // namespace

TokenFile::TokenFile(std::shared_ptr<const io::MappedFile> file, const std::string& path) : file_(std::move(file)) {
  const std::span<const std::byte> bytes = file_->bytes();
  Header header;
  if (bytes.size() < sizeof(header)) throw DataCorrupted("{}: {} bytes are no token file", path, bytes.size());
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kVersion)
    throw DataCorrupted("{}: not a token file of version {}", path, kVersion);
  const uint64_t space = bytes.size() - sizeof(header);
  if (header.num_documents > space / 8 || header.num_tokens > space / 4 ||
      header.num_documents * 8 + header.num_tokens * 4 != space)
    throw DataCorrupted("{}: {} documents and {} tokens do not fill {} bytes", path, header.num_documents,
                        header.num_tokens, bytes.size());
  const std::byte* data = bytes.data() + sizeof(header);
  ends_ = {reinterpret_cast<const uint64_t*>(data), header.num_documents};
  ids_ = {reinterpret_cast<const uint32_t*>(data + header.num_documents * 8), header.num_tokens};
  text_bytes_ = static_cast<int64_t>(header.text_bytes);
  uint64_t previous = 0;
  for (uint64_t end : ends_) {
    if (end <= previous || end > header.num_tokens)
      throw DataCorrupted("{}: a document ends at token {} after {} of {}", path, end, previous, header.num_tokens);
    previous = end;
  }
  if (previous != header.num_tokens)
    throw DataCorrupted("{}: {} tokens belong to no document", path, header.num_tokens - previous);
}

TokenFile TokenFile::open_or_make(const std::string& path, const Texts& texts, const io::Tokenizer& tokenizer,
                                  const std::string& tokenizer_hash, int32_t eos,
                                  const std::function<void(int64_t, int64_t)>& progress) {
  std::string sources =
      fmt::format("{}\n{}\n{}\n{}\n{}\n", tokenizer_hash, eos, texts.separator, texts.text_key, texts.parse_special);
  std::vector<std::shared_ptr<const io::MappedFile>> files;
  std::vector<std::string> hashes;
  int64_t total = 0, done = 0;
  for (const std::string& text : texts.files) {
    files.push_back(io::MappedFile::open(text));
    hashes.push_back(io::content_hash(files.back()->bytes()).hex());
    sources += fmt::format("{} {}\n", hashes.back(), is_json_lines(texts, text));
    total += static_cast<int64_t>(files.back()->bytes().size());
  }
  const std::string hash = io::sha256_hex(std::string_view(sources));
  const auto opened = [&](std::shared_ptr<const io::MappedFile> mapped) {
    TokenFile result(std::move(mapped), path);
    result.text_hashes_ = hashes;
    return result;
  };
  if (std::filesystem::exists(path)) {
    auto mapped = io::MappedFile::open(path);
    if (is_up_to_date(mapped->bytes(), hash)) return opened(std::move(mapped));
  }

  std::vector<uint64_t> ends;
  std::vector<uint32_t> ids;
  for (size_t f = 0; f < files.size(); ++f) {
    const std::string_view content(reinterpret_cast<const char*>(files[f]->bytes().data()), files[f]->bytes().size());
    for_each_document(texts, texts.files[f], content, [&](std::string_view text, int64_t begin, int64_t end) {
      const size_t first = ids.size();
      try {
        for (int32_t id : tokenizer.encode(text, {.add_special_tokens = true, .parse_special = texts.parse_special}))
          ids.push_back(static_cast<uint32_t>(id));
      } catch (const InvalidArgument& error) {
        throw InvalidArgument("{}: document at byte {}: {}", texts.files[f], begin, error.what());
      }
      // Some tokenizers append EOS themselves.
      if (ids.size() == first || ids.back() != static_cast<uint32_t>(eos)) ids.push_back(static_cast<uint32_t>(eos));
      ends.push_back(ids.size());
      if (progress) progress(done + end, total);
    });
    done += static_cast<int64_t>(content.size());
  }
  if (ends.empty())
    throw InvalidArgument("{}: nothing but white space; expected documents", fmt::join(texts.files, ", "));

  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.num_documents = ends.size();
  header.num_tokens = ids.size();
  header.text_bytes = static_cast<uint64_t>(total);
  std::memcpy(header.source_hash, hash.data(), 64);
  const auto ends_bytes = std::as_bytes(std::span(ends)), ids_bytes = std::as_bytes(std::span(ids));
  std::memcpy(header.data_hash, data_hash(ends_bytes, ids_bytes).data(), sizeof(header.data_hash));
  io::AtomicFile file(path);
  file.write(std::as_bytes(std::span(&header, 1)));
  file.write(ends_bytes);
  file.write(ids_bytes);
  file.commit();
  return opened(io::MappedFile::open(path));
}

std::span<const uint32_t> TokenFile::document(int64_t index) const {
  const auto i = static_cast<size_t>(index);
  const uint64_t begin = i == 0 ? 0 : ends_[i - 1];
  return ids_.subspan(begin, ends_[i] - begin);
}

void clear(Batch& batch) {
  for (auto* list : {&batch.token_ids, &batch.positions, &batch.labels, &batch.query_start, &batch.lengths})
    list->clear();
  batch.query_start.push_back(0);
  batch.num_labels = 0;
}

void append_piece(Batch& batch, std::span<const uint32_t> document, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    batch.token_ids.push_back(static_cast<int32_t>(document[static_cast<size_t>(t)]));
    batch.positions.push_back(static_cast<int32_t>(t - begin));
    const bool labelled = t + 1 < static_cast<int64_t>(document.size());
    batch.labels.push_back(labelled ? static_cast<int32_t>(document[static_cast<size_t>(t) + 1]) : -1);
    batch.num_labels += labelled;
  }
  batch.lengths.push_back(static_cast<int32_t>(end - begin));
  batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
}

DataLoader::DataLoader(const TokenFile& file, int64_t batch_tokens, int64_t sequence_length, uint64_t seed)
    : file_(file), batch_tokens_(batch_tokens), sequence_length_(sequence_length), seed_(seed) {
  shuffle();
}

void DataLoader::shuffle() {
  order_.resize(static_cast<size_t>(file_.num_documents()));
  std::iota(order_.begin(), order_.end(), 0);
  // Fisher-Yates. The modulo's bias is below 2^-40 for any number of documents that fits in memory.
  for (size_t i = order_.size(); i > 1; --i) {
    const PhiloxBlock block = philox4x32(seed_, i, static_cast<uint64_t>(cursor_.epoch));
    const uint64_t draw = (uint64_t{block.words[0]} << 32) | block.words[1];
    std::swap(order_[i - 1], order_[draw % i]);
  }
}

void DataLoader::seek(const DataCursor& cursor) {
  if (cursor.epoch < 0 || cursor.document < 0 || cursor.document >= file_.num_documents() || cursor.offset < 0)
    throw DataCorrupted("the checkpoint stands at epoch {}, document {}, token {}; the data has {} documents",
                        cursor.epoch, cursor.document, cursor.offset, file_.num_documents());
  cursor_ = cursor;
  shuffle();
  const auto length = static_cast<int64_t>(file_.document(order_[static_cast<size_t>(cursor.document)]).size());
  if (cursor.offset >= length)
    throw DataCorrupted("the checkpoint stands at token {} of document {}, which has {}", cursor.offset,
                        cursor.document, length);
}

void DataLoader::next(Batch& batch) {
  clear(batch);
  int64_t room = batch_tokens_;
  while (room > 0) {
    const std::span<const uint32_t> document = file_.document(order_[static_cast<size_t>(cursor_.document)]);
    const auto length = static_cast<int64_t>(document.size());
    const int64_t end = std::min({length, cursor_.offset + sequence_length_, cursor_.offset + room});
    append_piece(batch, document, cursor_.offset, end);
    room -= end - cursor_.offset;
    cursor_.offset = end;
    if (end < length) continue;
    cursor_.offset = 0;
    if (++cursor_.document == file_.num_documents()) {
      cursor_.document = 0;
      ++cursor_.epoch;
      shuffle();
    }
  }
}

}  // namespace eadem::train
