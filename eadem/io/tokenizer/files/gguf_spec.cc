// SPDX-License-Identifier: Apache-2.0
//
// tokenizer.ggml.* to a TokenizerSpec. Conventions are llama.cpp's, which defines them.
#include <algorithm>
#include <cctype>
#include <limits>
#include <numeric>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/gguf_pre_types.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_model.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

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
    if (data.token_types[id] < static_cast<int32_t>(GgufTokenType::kNormal) ||
        data.token_types[id] > static_cast<int32_t>(GgufTokenType::kByte)) {
      throw DataCorrupted("{}: tokenizer.ggml.token_type[{}] is {}; expected 1 .. 6", data.source, id,
                          data.token_types[id]);
    }
  }
  if (data.model == "llama" || data.model == "t5") check("scores", data.scores.size());
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

GgufTokenType type_of(const GgufTokenizerData& data, size_t id) {
  return data.token_types.empty() ? GgufTokenType::kNormal : static_cast<GgufTokenType>(data.token_types[id]);
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
    const GgufTokenType type = type_of(data, order[i]);
    // Control, byte and unused tokens never come out of ordinary text.
    if (type == GgufTokenType::kNormal || type == GgufTokenType::kUserDefined) ranks[order[i]] = rank;
  }
  return ranks;
}

// Uses the whole normalizer that a file of SentencePiece describes.
void use_normalizer_of_model(const GgufTokenizerData& data, TokenizerSpec& spec) {
  NormalizerStep step{};
  step.kind = NormalizerStep::Kind::kSentencePiece;
  step.content = data.precompiled_charsmap;
  step.add_dummy_prefix = data.add_space_prefix.value_or(true);
  step.remove_extra_whitespaces = data.remove_extra_whitespaces;
  for (size_t id = 0; id < data.tokens.size(); ++id)
    if (type_of(data, id) == GgufTokenType::kUserDefined) step.user_defined_symbols.push_back(data.tokens[id]);
  spec.normalizers = {std::move(step)};
}

// Texts as SentencePiece's normalizer leaves them, but for the spelling of spaces, as llama.cpp has them.
void use_sentencepiece_normalizer(const GgufTokenizerData& data, TokenizerSpec& spec) {
  if (!data.precompiled_charsmap.empty()) {
    NormalizerStep step{};
    step.kind = NormalizerStep::Kind::kPrecompiled;
    step.content = data.precompiled_charsmap;
    step.longest = true;
    spec.normalizers.push_back(std::move(step));
  }
  if (!data.remove_extra_whitespaces) return;
  // Only single spaces are left at the ends when the second pattern looks for them.
  for (const auto& [pattern, content] : {std::pair(" {2,}", " "), {R"((?<![\s\S]) | (?![\s\S]))", ""}}) {
    NormalizerStep step{};
    step.kind = NormalizerStep::Kind::kReplace;
    step.pattern = {Pattern::Kind::kRegex, pattern};
    step.content = content;
    spec.normalizers.push_back(std::move(step));
  }
}

// The scores of a unigram model. Normal tokens have their own. Those that a user defined gain with each byte, so that
// no other way to write it reaches them. kSymbolScore was found by comparing ids with version 0.2.3 of the
// sentencepiece package: its source is published with other constants, which do not give these ids.
constexpr double kSymbolScore = 0.1;
void use_unigram(const GgufTokenizerData& data, TokenizerSpec& spec) {
  spec.model = TokenizerSpec::Model::kUnigram;
  spec.single_precision = true;
  float least = std::numeric_limits<float>::max();
  double most = kSymbolScore;
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    if (type_of(data, id) != GgufTokenType::kNormal) continue;
    least = std::min(least, data.scores[id]);
    most = std::max<double>(most, data.scores[id]);
  }
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    const GgufTokenType type = type_of(data, id);
    spec.scores.push_back(type == GgufTokenType::kNormal ? data.scores[id]
                          : type == GgufTokenType::kUserDefined
                              ? static_cast<float>(static_cast<double>(data.tokens[id].size()) * most - kSymbolScore)
                              : std::numeric_limits<double>::quiet_NaN());
  }
  spec.unk_score = static_cast<float>(least - kUnknownPenalty);
}

// Spaces are spelt U+2581, and a byte may have a token <0xNN>. With `strip` a text does not begin with a space.
constexpr int64_t kAllSpaces = 1 << 20;
void use_metaspace_decoder(const GgufTokenizerData& data, bool strip, TokenizerSpec& spec) {
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    const std::string& token = data.tokens[id];
    const bool spelt = token.size() == 6 && token.starts_with("<0x") && token.ends_with('>');
    if (spelt && (!data.of_sentencepiece || type_of(data, id) == GgufTokenType::kByte)) spec.byte_fallback = true;
  }
  DecoderStep spaces{};
  spaces.kind = DecoderStep::Kind::kReplace;
  spaces.pattern = {Pattern::Kind::kString, std::string(kMetaspace)};
  spaces.content = " ";
  spec.decoders = {spaces};
  for (const auto kind : {DecoderStep::Kind::kByteFallback, DecoderStep::Kind::kFuse}) {
    DecoderStep step{};
    step.kind = kind;
    if (kind == DecoderStep::Kind::kFuse || spec.byte_fallback || !data.of_sentencepiece) spec.decoders.push_back(step);
  }
  if (strip) {
    DecoderStep step{};
    step.kind = DecoderStep::Kind::kStrip;
    step.content = " ";
    step.start = data.remove_extra_whitespaces ? kAllSpaces : 1;
    spec.decoders.push_back(std::move(step));
  }
}

// With `prefix` a text begins with a space.
void use_metaspace_spelling(const GgufTokenizerData& data, bool prefix, TokenizerSpec& spec) {
  if (prefix) {
    NormalizerStep prepend{};
    prepend.kind = NormalizerStep::Kind::kPrepend;
    prepend.content = kMetaspace;
    spec.normalizers.push_back(std::move(prepend));
  }
  NormalizerStep replace{};
  replace.kind = NormalizerStep::Kind::kReplace;
  replace.pattern = {Pattern::Kind::kString, " "};
  replace.content = kMetaspace;
  spec.normalizers.push_back(std::move(replace));
  use_metaspace_decoder(data, prefix, spec);
}

const GgufPreType& pre_type_of(const GgufTokenizerData& data) {
  const std::string_view name = data.model == "gemma4" ? "gemma4" : std::string_view(data.pre);
  const GgufPreType* type = find_gguf_pre_type(name);
  if (type == nullptr) {
    throw Unsupported("{}: tokenizer.ggml.pre {} is not supported; known are {}", data.source,
                      name.empty() ? "is missing, which" : quote(name), gguf_pre_type_names());
  }
  return *type;
}

void use_pre_type(const GgufTokenizerData& data, const GgufPreType& type, TokenizerSpec& spec) {
  if (!type.byte_level) use_metaspace_spelling(data, false, spec);
  for (PreTokenizerStep& step : steps_of(type)) spec.pre_tokenizers.push_back(std::move(step));
  if (type.byte_level) {
    DecoderStep decoder{};
    decoder.kind = DecoderStep::Kind::kByteLevel;
    spec.decoders.push_back(std::move(decoder));
  }
  spec.ignore_merges = type.ignore_merges;
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

bool takes_space_behind(const GgufTokenizerData& data, std::string_view token) {
  std::string name = data.name;
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name.find("phi-3") == std::string::npos && name.find("phi3") == std::string::npos) return false;
  return token != "<unk>" && token != "<s>" && token != "<|endoftext|>";
}

TokenizerSpec spec_from_gguf(const GgufTokenizerData& data, const std::atomic<bool>* cancel) {
  constexpr std::string_view kModels[] = {"gpt2", "llama", "t5", "gemma4"};
  if (std::find(std::begin(kModels), std::end(kModels), data.model) == std::end(kModels))
    throw Unsupported("{}: tokenizer.ggml.model {} is not supported; gpt2, llama, t5 and gemma4 are", data.source,
                      quote(data.model));
  check_lists(data);
  TokenizerSpec spec;
  spec.source = data.source;
  spec.chat_templates = data.chat_templates;
  spec.added_tokens_are_text = !data.of_sentencepiece;
  spec.added_tokens_are_normal = data.of_sentencepiece;
  spec.bos = id_of(data.bos, "bos_token_id", data);
  spec.eos = id_of(data.eos, "eos_token_id", data);
  spec.unk = id_of(data.unk, "unknown_token_id", data);
  spec.pad = id_of(data.pad, "padding_token_id", data);
  const auto add_end = [&](const std::optional<int64_t>& value, const char* key) {
    if (const auto id = id_of(value, key, data)) spec.end_tokens.push_back({*id, std::string("tokenizer.ggml.") + key});
  };
  add_end(data.eot, "eot_token_id");
  add_end(data.eom, "eom_token_id");
  for (const int64_t id : data.eos_ids) add_end(id, "eos_token_ids");
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    spec.vocab.push_back({data.tokens[id], static_cast<int32_t>(id)});
    const GgufTokenType type = type_of(data, id);
    const bool user_defined = type == GgufTokenType::kUserDefined && data.model != "t5";
    if (type != GgufTokenType::kUnknown && type != GgufTokenType::kControl && !user_defined) continue;
    AddedToken token;
    token.id = static_cast<int32_t>(id);
    token.content = data.tokens[id];
    token.special = type != GgufTokenType::kUserDefined;
    token.normalized = user_defined && data.of_sentencepiece;
    token.rstrip = takes_space_behind(data, token.content);
    spec.added_tokens.push_back(std::move(token));
  }
  bool add_bos = true;
  if (data.model == "llama" || data.model == "t5") {
    const bool prefix = data.add_space_prefix.value_or(true);
    add_bos = data.model == "llama";
    if (data.model == "t5")
      use_unigram(data, spec);
    else
      merges_from_ranks(data.tokens, ranks_from_scores(data), false, spec, cancel);
    if (data.of_sentencepiece) {
      use_metaspace_decoder(data, prefix || data.remove_extra_whitespaces, spec);
      use_normalizer_of_model(data, spec);
      spec.fuse_unk = true;
    } else {
      use_sentencepiece_normalizer(data, spec);
      use_metaspace_spelling(data, prefix, spec);
    }
    if (spec.unk) spec.unk_token = data.tokens[static_cast<size_t>(*spec.unk)];
  } else {
    const GgufPreType& type = pre_type_of(data);
    use_pre_type(data, type, spec);
    add_bos = type.add_bos;
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
  if (data.add_eos.value_or(data.model == "t5")) {
    if (!spec.eos) {
      throw DataCorrupted("{}: tokenizer.ggml.add_eos_token is true, but there is no eos_token_id", data.source);
    }
    spec.suffix_ids.push_back(*spec.eos);
  }
  return spec;
}

}  // namespace eadem::io
