// SPDX-License-Identifier: Apache-2.0
//
// SentencePiece's tokenizer.model: a message in the wire format of Protocol Buffers, of which a few fields matter. They
// are what a GGUF file says of such a vocabulary in other words.
// Source of the field numbers: github.com/google/sentencepiece, src/sentencepiece_model.proto (facts only).
#include <bit>
#include <cmath>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

// The fields of one message, front to back.
class Message {
 public:
  Message(std::string_view bytes, const std::string& source) : rest_(bytes), source_(source) {}

  // The next field; false at the end.
  bool next() {
    if (rest_.empty()) return false;
    const uint64_t key = varint();
    number_ = key >> 3;
    switch (key & 7) {
      case 0: value_ = varint(); break;
      case 1: value_ = 0, bytes_ = take(8); break;
      case 2: value_ = 0, bytes_ = take(varint()); break;
      case 5: value_ = 0, bytes_ = take(4); break;
      default: fail(fmt::format("field {} of wire type {}", number_, key & 7));
    }
    wire_ = static_cast<int>(key & 7);
    return true;
  }

  uint64_t number() const { return number_; }
  bool boolean() const { return integer() != 0; }
  int64_t integer() const {
    require(0);
    return static_cast<int64_t>(value_);
  }
  float number_f32() const {
    require(5);
    uint32_t bits = 0;
    for (size_t i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(static_cast<unsigned char>(bytes_[i])) << (8 * i);
    return std::bit_cast<float>(bits);
  }
  std::string_view bytes() const {
    require(2);
    return bytes_;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw DataCorrupted("{}: not a SentencePiece model: {}", source_, problem);
  }
  void require(int wire) const {
    if (wire_ != wire) fail(fmt::format("field {} has wire type {}, not {}", number_, wire_, wire));
  }
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) fail(fmt::format("field {} of {} bytes, {} are left", number_, size, rest_.size()));
    const std::string_view taken = rest_.substr(0, static_cast<size_t>(size));
    rest_.remove_prefix(static_cast<size_t>(size));
    return taken;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
    fail("an integer of more than 64 bits");
  }

  std::string_view rest_, bytes_;
  const std::string& source_;
  uint64_t number_ = 0, value_ = 0;
  int wire_ = 0;
};

struct Specials {
  std::string bos = "<s>", eos = "</s>", pad = "<pad>";
};

void read_piece(Message piece, GgufTokenizerData& data) {
  std::string text;
  float score = 0;
  int64_t type = static_cast<int64_t>(GgufTokenType::kNormal);  // the numbers of both formats are the same
  while (piece.next()) {
    if (piece.number() == 1) text = piece.bytes();
    if (piece.number() == 2) score = piece.number_f32();
    if (piece.number() == 3) type = piece.integer();
  }
  if (type < static_cast<int64_t>(GgufTokenType::kNormal) || type > static_cast<int64_t>(GgufTokenType::kByte))
    throw DataCorrupted("{}: piece {} has type {}; expected 1 .. 6", data.source, data.tokens.size(), type);
  data.tokens.push_back(std::move(text));
  data.scores.push_back(score);
  data.token_types.push_back(static_cast<int32_t>(type));
}

void read_trainer(Message trainer, GgufTokenizerData& data, Specials& specials) {
  while (trainer.next()) {
    switch (trainer.number()) {
      case 3: {
        const int64_t type = trainer.integer();
        if (type != 1 && type != 2)
          throw Unsupported("{}: model type {}; unigram (1) and BPE (2) are supported", data.source, type);
        data.model = type == 1 ? "t5" : "llama";
        break;
      }
      case 24:
        if (trainer.boolean()) throw Unsupported("{}: treat_whitespace_as_suffix is not supported", data.source);
        break;
      case 46: specials.bos = trainer.bytes(); break;
      case 47: specials.eos = trainer.bytes(); break;
      case 48: specials.pad = trainer.bytes(); break;
      default: break;
    }
  }
}

void read_normalizer(Message normalizer, GgufTokenizerData& data) {
  while (normalizer.next()) {
    switch (normalizer.number()) {
      case 2: data.precompiled_charsmap = normalizer.bytes(); break;
      case 3: data.add_space_prefix = normalizer.boolean(); break;
      case 4: data.remove_extra_whitespaces = normalizer.boolean(); break;
      case 5:
        if (!normalizer.boolean())
          throw Unsupported("{}: escape_whitespaces is off, which is not supported", data.source);
        break;
      default: break;
    }
  }
}

}  // namespace

// The first field is a piece. No text begins with a line feed and a number that is not printable.
bool is_sentencepiece(std::string_view content) { return content.starts_with('\n'); }

GgufTokenizerData sentencepiece_data(std::string_view content, const std::string& source) {
  GgufTokenizerData data;
  data.source = source;
  data.of_sentencepiece = true;
  data.model = "t5";  // what the format means by saying nothing, as in the next two
  data.add_space_prefix = true;
  data.remove_extra_whitespaces = true;
  Specials specials;
  for (Message model(content, source); model.next();) {
    if (model.number() == 1) read_piece(Message(model.bytes(), source), data);
    if (model.number() == 2) read_trainer(Message(model.bytes(), source), data, specials);
    if (model.number() == 3) read_normalizer(Message(model.bytes(), source), data);
  }
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    const auto type = static_cast<GgufTokenType>(data.token_types[id]);
    const auto here = static_cast<int64_t>(id);
    if (type == GgufTokenType::kUnknown) data.unk = here;
    if (type != GgufTokenType::kControl) continue;
    if (data.tokens[id] == specials.bos) data.bos = here;
    if (data.tokens[id] == specials.eos) data.eos = here;
    if (data.tokens[id] == specials.pad) data.pad = here;
  }
  data.add_bos = data.model == "llama" && data.bos;  // Llama's way; a tokenizer_config.json may say otherwise
  data.add_eos = false;
  return data;
}

TokenizerSpec spec_from_sentencepiece(std::string_view content, const std::string& source,
                                      const std::atomic<bool>* cancel) {
  return spec_from_gguf(sentencepiece_data(content, source), cancel);
}

}  // namespace eadem::io
