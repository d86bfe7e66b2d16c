// SPDX-License-Identifier: Apache-2.0
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_model.h"

namespace eadem::io {
namespace {

void refuse_unread(const JsonReader& root) {
  const auto unread = root.unread_keys();
  if (!unread.empty()) throw Unsupported("{}: not supported: {}", root.file(), fmt::join(unread, ", "));
}

// Batches of training were cut and filled up like this. Texts here are as long as they are.
void note_unused(const JsonReader& root, std::string_view key, TokenizerSpec& spec) {
  const JsonValue* value = root.raw(key);
  if (value == nullptr || value->is_null()) return;
  const JsonValue* length = value->is_object() ? value->find("max_length") : nullptr;
  spec.notes.push_back(length != nullptr && length->kind() == JsonValue::Kind::integer
                           ? fmt::format("{} to {} tokens is not applied", key, length->as_integer())
                           : fmt::format("{} is not applied", key));
}

void read_vocab(const JsonReader& model, TokenizerSpec& spec) {
  if (!model.has("vocab")) model.fail("vocab", "an object of tokens");
  const JsonValue* vocab = model.raw("vocab");
  if (!vocab->is_object()) model.fail("vocab", "an object of tokens");
  spec.vocab.reserve(vocab->as_object().size());
  for (const JsonMember& member : vocab->as_object()) {
    const bool valid = member.value.kind() == JsonValue::Kind::integer && member.value.as_integer() >= 0 &&
                       member.value.as_integer() < kMaxVocab;
    if (!valid) {
      throw DataCorrupted("{}: model.vocab: the id of {} is {}; expected an integer in [0, {}]", model.file(),
                          quote(member.key), to_compact_json(member.value), kMaxVocab - 1);
    }
    spec.vocab.push_back({member.key, static_cast<int32_t>(member.value.as_integer())});
  }
}

void read_merges(const JsonReader& model, TokenizerSpec& spec) {
  if (!model.has("merges")) model.fail("merges", "an array of merges");
  const JsonValue* merges = model.raw("merges");
  if (!merges->is_array()) model.fail("merges", "an array of merges");
  spec.merges.reserve(merges->as_array().size());
  MergeReader reader(spec);
  for (const JsonValue& merge : merges->as_array()) {
    if (merge.is_string()) {
      reader.add_line(merge.as_string());
    } else if (merge.is_array() && merge.as_array().size() == 2 && merge.as_array()[0].is_string() &&
               merge.as_array()[1].is_string()) {
      reader.add(merge.as_array()[0].as_string(), merge.as_array()[1].as_string());
    } else {
      throw DataCorrupted("{}: model.merges[{}] is {}; expected \"left right\" or [\"left\", \"right\"]", model.file(),
                          spec.merges.size(), to_compact_json(merge));
    }
  }
}

bool is_json_number(const JsonValue& value) {
  return value.kind() == JsonValue::Kind::integer || value.kind() == JsonValue::Kind::number;
}

// The vocabulary is a list of tokens and scores; the position is the id.
void read_unigram(const JsonReader& model, TokenizerSpec& spec) {
  spec.model = TokenizerSpec::Model::kUnigram;
  spec.byte_fallback = model.optional_boolean("byte_fallback").value_or(false);
  const JsonValue* vocab = model.raw("vocab");
  if (vocab == nullptr || !vocab->is_array()) model.fail("vocab", "an array of tokens and scores");
  double least = 0;
  for (const JsonValue& entry : vocab->as_array()) {
    const bool valid = entry.is_array() && entry.as_array().size() == 2 && entry.as_array()[0].is_string() &&
                       is_json_number(entry.as_array()[1]);
    if (!valid)
      throw DataCorrupted("{}: model.vocab[{}] is {}; expected [\"token\", score]", model.file(), spec.vocab.size(),
                          to_compact_json(entry));
    if (spec.vocab.size() >= static_cast<size_t>(kMaxVocab))
      throw DataCorrupted("{}: model.vocab has {} tokens; at most {} are taken", model.file(), vocab->as_array().size(),
                          kMaxVocab);
    spec.scores.push_back(entry.as_array()[1].as_number());
    least = spec.vocab.empty() ? spec.scores.back() : std::min(least, spec.scores.back());
    spec.vocab.push_back({entry.as_array()[0].as_string(), static_cast<int32_t>(spec.vocab.size())});
  }
  spec.unk_score = least - kUnknownPenalty;
  if (const auto unk = model.optional_integer("unk_id", 0, kMaxVocab - 1)) {
    if (static_cast<size_t>(*unk) >= spec.vocab.size())
      throw DataCorrupted("{}: model.unk_id is {}; the vocabulary has {} tokens", model.file(), *unk,
                          spec.vocab.size());
    spec.unk_token = spec.vocab[static_cast<size_t>(*unk)].text;
  }
}

void read_word_piece(const JsonReader& model, TokenizerSpec& spec) {
  spec.model = TokenizerSpec::Model::kWordPiece;
  spec.unk_token = model.string("unk_token");
  spec.continuing_prefix = model.string("continuing_subword_prefix");
  spec.max_word_chars = static_cast<size_t>(model.integer("max_input_chars_per_word", 0, kMaxVocab));
  read_vocab(model, spec);
}

void read_model(const JsonReader& model, TokenizerSpec& spec) {
  // Files from before the `type` key are BPE when they have merges.
  const std::string type = model.optional_string("type").value_or(model.has("merges") ? "BPE" : "none");
  if (type == "Unigram") return read_unigram(model, spec);
  if (type == "WordPiece") return read_word_piece(model, spec);
  if (type != "BPE")
    throw Unsupported("{}: model type {} is not supported; BPE, Unigram and WordPiece are", model.file(), quote(type));
  if (const auto dropout = model.optional_number("dropout"); dropout && *dropout != 0) {
    throw Unsupported("{}: model.dropout is {}; only null or 0 is supported", model.file(), *dropout);
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const auto text = model.optional_string(key); text && !text->empty()) {
      throw Unsupported("{}: model.{} is {}; only null or empty is supported", model.file(), key, quote(*text));
    }
  }
  spec.unk_token = model.optional_string("unk_token").value_or("");
  spec.fuse_unk = model.optional_boolean("fuse_unk").value_or(false);
  spec.byte_fallback = model.optional_boolean("byte_fallback").value_or(false);
  spec.ignore_merges = model.optional_boolean("ignore_merges").value_or(false);
  read_vocab(model, spec);
  read_merges(model, spec);
}

void read_added_tokens(const JsonReader& root, TokenizerSpec& spec) {
  if (!root.has("added_tokens")) {
    root.ignore("added_tokens");
    return;
  }
  for (const JsonReader& reader : root.elements("added_tokens")) {
    AddedToken token;
    token.id = static_cast<int32_t>(reader.integer("id", 0, kMaxVocab - 1));
    token.content = reader.string("content");
    token.special = reader.boolean("special");
    token.lstrip = reader.optional_boolean("lstrip").value_or(false);
    token.rstrip = reader.optional_boolean("rstrip").value_or(false);
    token.single_word = reader.optional_boolean("single_word").value_or(false);
    token.normalized = reader.optional_boolean("normalized").value_or(!token.special);
    spec.added_tokens.push_back(std::move(token));
  }
}

}  // namespace

struct MergeReader::Ids {
  std::unordered_map<std::string_view, int32_t> by_text;  // texts of the vocabulary
  std::string joined;
};

MergeReader::MergeReader(TokenizerSpec& spec) : spec_(spec), ids_(std::make_unique<Ids>()) {
  ids_->by_text.reserve(spec.vocab.size());
  for (const VocabEntry& entry : spec.vocab) ids_->by_text.emplace(entry.text, entry.id);
}

MergeReader::~MergeReader() = default;

void MergeReader::add(std::string_view left, std::string_view right) {
  ids_->joined.assign(left);
  ids_->joined += right;
  const auto id_of = [&](std::string_view text) {
    const auto found = ids_->by_text.find(text);
    if (found == ids_->by_text.end()) {
      throw DataCorrupted("{}: merge {} ({} + {}): {} is not in the vocabulary", spec_.source, spec_.merges.size(),
                          quote(left), quote(right), quote(text));
    }
    return found->second;
  };
  spec_.merges.push_back({id_of(left), id_of(right), id_of(ids_->joined), static_cast<uint32_t>(spec_.merges.size())});
}

void MergeReader::add_line(std::string_view line) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
    throw DataCorrupted("{}: merge {} is {}; expected two tokens with one space between", spec_.source,
                        spec_.merges.size(), quote(line));
  }
  add(line.substr(0, space), line.substr(space + 1));
}

TokenizerSpec spec_from_json(std::string_view json, const std::string& source) {
  const JsonReader root = JsonReader::parse(json, source);
  TokenizerSpec spec;
  spec.source = source;
  if (const auto version = root.optional_string("version"); version && *version != "1.0") {
    throw Unsupported("{}: version {} is not supported; 1.0 is", source, quote(*version));
  }
  note_unused(root, "truncation", spec);
  note_unused(root, "padding", spec);
  read_model(root.object("model"), spec);
  read_added_tokens(root, spec);
  spec.normalizers = read_normalizers(root);
  spec.pre_tokenizers = read_pre_tokenizers(root);
  spec.decoders = read_decoders(root);
  spec.join_with_space = !root.optional_object("decoder").has_value();  // an empty Sequence joins with nothing
  read_post_processor(root, spec);
  refuse_unread(root);
  return spec;
}

}  // namespace eadem::io
