// SPDX-License-Identifier: Apache-2.0
//
// tokenizer.ggml.* to a TokenizerSpec. Conventions are llama.cpp's, which defines them.
#include <algorithm>
#include <numeric>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/bpe_model.h"
#include "eadem/io/tokenizer/readers.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

enum TokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

constexpr const char* kMetaspace = "\xE2\x96\x81";

struct PreType {
  std::string_view name;
  KnownPattern pattern;
  bool ignore_merges;
  bool add_bos;
};
constexpr PreType kPreTypes[] = {
    {"gpt-2", KnownPattern::kGpt2, false, false},  {"llama-bpe", KnownPattern::kLlama3, true, true},
    {"llama3", KnownPattern::kLlama3, true, true}, {"llama-v3", KnownPattern::kLlama3, true, true},
    {"qwen2", KnownPattern::kQwen2, false, false},
};

void check_lists(const GgufTokenizerData& data) {
  const auto check = [&](std::string_view key, size_t size) {
    if (size != data.tokens.size()) {
      throw DataCorrupted("{}: tokenizer.ggml.{} has {} entries, tokenizer.ggml.tokens {}", data.source, key, size,
                          data.tokens.size());
    }
  };
  if (data.tokens.size() > static_cast<size_t>(kMaxVocab)) {
    throw DataCorrupted("{}: tokenizer.ggml.tokens has {} entries; at most {} are taken", data.source,
                        data.tokens.size(), kMaxVocab);
  }
  if (!data.token_types.empty()) check("token_type", data.token_types.size());
  for (size_t id = 0; id < data.token_types.size(); ++id) {
    if (data.token_types[id] < kNormal || data.token_types[id] > kByte) {
      throw DataCorrupted("{}: tokenizer.ggml.token_type[{}] is {}; expected 1 .. 6", data.source, id,
                          data.token_types[id]);
    }
  }
  if (data.model == "llama") check("scores", data.scores.size());
  for (size_t id = 0; id < data.scores.size(); ++id) {
    if (!(data.scores[id] == data.scores[id])) {
      throw DataCorrupted("{}: tokenizer.ggml.scores[{}] is not a number", data.source, id);
    }
  }
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    if (find_invalid_utf8(data.tokens[id]) != std::string::npos) {
      throw DataCorrupted("{}: tokenizer.ggml.tokens[{}] is not UTF-8: {}", data.source, id, quote(data.tokens[id]));
    }
  }
}

// Higher scores merge first; equal scores share a rank and go left to right.
std::vector<uint32_t> ranks_from_scores(const GgufTokenizerData& data) {
  std::vector<size_t> order(data.tokens.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return data.scores[a] > data.scores[b]; });
  std::vector<uint32_t> ranks(data.tokens.size(), MergeTable::kNoRank);
  uint32_t rank = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && data.scores[order[i]] != data.scores[order[i - 1]]) ++rank;
    const int32_t type = data.token_types.empty() ? kNormal : data.token_types[order[i]];
    // Control, byte and unused tokens never come out of ordinary text.
    if (type == kNormal || type == kUserDefined) ranks[order[i]] = rank;
  }
  return ranks;
}

void use_sentencepiece(const GgufTokenizerData& data, TokenizerSpec& spec) {
  merges_from_ranks(data.tokens, ranks_from_scores(data), false, spec);
  const auto has_token = [&](std::string_view text) {
    return std::find(data.tokens.begin(), data.tokens.end(), text) != data.tokens.end();
  };
  spec.byte_fallback = has_token("<0x00>");
  NormalizerStep replace{};
  replace.kind = NormalizerStep::Kind::kReplace;
  replace.pattern = {Pattern::Kind::kString, " "};
  replace.content = kMetaspace;
  const bool prefix = data.add_space_prefix.value_or(true);
  if (prefix) {
    NormalizerStep prepend{};
    prepend.kind = NormalizerStep::Kind::kPrepend;
    prepend.content = kMetaspace;
    spec.normalizers.push_back(std::move(prepend));
  }
  spec.normalizers.push_back(std::move(replace));
  DecoderStep spaces{};
  spaces.kind = DecoderStep::Kind::kReplace;
  spaces.pattern = {Pattern::Kind::kString, kMetaspace};
  spaces.content = " ";
  DecoderStep bytes{};
  bytes.kind = DecoderStep::Kind::kByteFallback;
  DecoderStep fuse{};
  fuse.kind = DecoderStep::Kind::kFuse;
  spec.decoders = {spaces, bytes, fuse};
  if (prefix) {
    DecoderStep strip{};
    strip.kind = DecoderStep::Kind::kStrip;
    strip.content = " ";
    strip.start = 1;
    spec.decoders.push_back(std::move(strip));
  }
}

std::optional<int32_t> id_of(const std::optional<int64_t>& id, std::string_view key, const GgufTokenizerData& data) {
  // 2^32 - 1 and -1 are how converters write "none".
  if (!id || *id == -1 || *id == UINT32_MAX) return std::nullopt;
  if (*id < 0 || *id >= static_cast<int64_t>(data.tokens.size())) {
    throw DataCorrupted("{}: tokenizer.ggml.{} is {}; the vocabulary has {} tokens", data.source, key, *id,
                        data.tokens.size());
  }
  return static_cast<int32_t>(*id);
}

}  // namespace

TokenizerSpec spec_from_gguf(const GgufTokenizerData& data) {
  if (data.model != "gpt2" && data.model != "llama") {
    throw Unsupported("{}: tokenizer.ggml.model {} is not supported; gpt2 and llama are", data.source,
                      quote(data.model));
  }
  check_lists(data);
  TokenizerSpec spec;
  spec.source = data.source;
  spec.chat_template = data.chat_template;
  spec.bos = id_of(data.bos, "bos_token_id", data);
  spec.eos = id_of(data.eos, "eos_token_id", data);
  spec.unk = id_of(data.unk, "unknown_token_id", data);
  spec.pad = id_of(data.pad, "padding_token_id", data);
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    spec.vocab.push_back({data.tokens[id], static_cast<int32_t>(id)});
    const int32_t type = data.token_types.empty() ? kNormal : data.token_types[id];
    if (type != kUnknown && type != kControl && type != kUserDefined) continue;
    AddedToken token;
    token.id = static_cast<int32_t>(id);
    token.content = data.tokens[id];
    token.special = type != kUserDefined;
    spec.added_tokens.push_back(std::move(token));
  }
  bool add_bos = true;
  if (data.model == "llama") {
    use_sentencepiece(data, spec);
    if (spec.unk) spec.unk_token = data.tokens[static_cast<size_t>(*spec.unk)];
  } else {
    const auto type = std::find_if(std::begin(kPreTypes), std::end(kPreTypes),
                                   [&](const PreType& known) { return known.name == data.pre; });
    if (type == std::end(kPreTypes)) {
      throw Unsupported("{}: tokenizer.ggml.pre {} is not supported; gpt-2, llama-bpe and qwen2 are", data.source,
                        quote(data.pre));
    }
    use_byte_level(type->pattern, spec);
    spec.ignore_merges = type->ignore_merges;
    add_bos = type->add_bos;
    MergeReader merges(spec);
    for (const std::string& merge : data.merges) merges.add_line(merge);
  }
  if (data.add_bos.value_or(add_bos)) {
    if (spec.bos) {
      spec.prefix_ids.push_back(*spec.bos);
    } else if (data.add_bos) {
      throw DataCorrupted("{}: tokenizer.ggml.add_bos_token is true, but there is no bos_token_id", data.source);
    }
  }
  if (data.add_eos.value_or(false)) {
    if (!spec.eos) {
      throw DataCorrupted("{}: tokenizer.ggml.add_eos_token is true, but there is no eos_token_id", data.source);
    }
    spec.suffix_ids.push_back(*spec.eos);
  }
  return spec;
}

}  // namespace eadem::io
