// SPDX-License-Identifier: Apache-2.0
//
// Vocabularies outside tokenizer.json: vocab.json + merges.txt, and tiktoken ranks.
#include <algorithm>
#include <charconv>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_model.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    lines.push_back(line);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+') return 62;
  return c == '/' ? 63 : -1;
}

// The special tokens of the Llama 3.1 release. Llama 3.0 has equal ids and meanings for all that it also has.
// Source: the tokenizer configuration of the Llama 3.1 checkpoints.
constexpr int32_t kLlama3Ranks = 128000;
constexpr int kLlama3Specials = 256;
std::vector<std::string> llama3_specials() {
  std::vector<std::string> names = {"<|begin_of_text|>",
                                    "<|end_of_text|>",
                                    "<|reserved_special_token_0|>",
                                    "<|reserved_special_token_1|>",
                                    "<|finetune_right_pad_id|>",
                                    "<|reserved_special_token_2|>",
                                    "<|start_header_id|>",
                                    "<|end_header_id|>",
                                    "<|eom_id|>",
                                    "<|eot_id|>",
                                    "<|python_tag|>"};
  for (int reserved = 3; names.size() < kLlama3Specials; ++reserved) {
    names.push_back(fmt::format("<|reserved_special_token_{}|>", reserved));
  }
  return names;
}

}  // namespace

// The standard alphabet, with padding.
bool decode_base64(std::string_view text, std::string& bytes) {
  bytes.clear();
  if (text.empty() || text.size() % 4 != 0) return false;
  size_t padding = 0;
  while (padding < 2 && text.ends_with('=')) text.remove_suffix(1), ++padding;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const int value = base64_value(c);
    if (value < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count & 0xFF));
    }
  }
  return true;
}

NormalizerStep nfc_step() {
  NormalizerStep step{};
  step.kind = NormalizerStep::Kind::kNfc;
  return step;
}

void use_byte_level(KnownPattern pattern, TokenizerSpec& spec) {
  PreTokenizerStep bytes{};
  bytes.kind = PreTokenizerStep::Kind::kByteLevel;
  bytes.use_regex = pattern == KnownPattern::kGpt2;
  if (!bytes.use_regex) {
    PreTokenizerStep split{};
    split.kind = PreTokenizerStep::Kind::kSplit;
    split.pattern = {Pattern::Kind::kRegex, std::string(pattern_text(pattern))};
    spec.pre_tokenizers.push_back(std::move(split));
  }
  spec.pre_tokenizers.push_back(std::move(bytes));
  DecoderStep decoder{};
  decoder.kind = DecoderStep::Kind::kByteLevel;
  spec.decoders.push_back(std::move(decoder));
}

TokenizerSpec spec_from_vocab_and_merges(const std::string& vocab_path, const std::string& merges_path,
                                         KnownPattern pattern) {
  TokenizerSpec spec;
  spec.source = vocab_path;
  const JsonReader vocab = JsonReader::read(vocab_path);
  if (!vocab.value().is_object()) throw DataCorrupted("{}: expected an object of tokens", vocab_path);
  for (const JsonMember& member : vocab.value().as_object()) {
    const bool valid = member.value.kind() == JsonValue::Kind::integer && member.value.as_integer() >= 0 &&
                       member.value.as_integer() < kMaxVocab;
    if (!valid) {
      throw DataCorrupted("{}: the id of {} is {}; expected an integer in [0, {}]", vocab_path, quote(member.key),
                          to_compact_json(member.value), kMaxVocab - 1);
    }
    spec.vocab.push_back({member.key, static_cast<int32_t>(member.value.as_integer())});
  }
  const std::string merges = read_file(merges_path, kMaxTokenizerFileBytes);
  if (const size_t bad = find_invalid_utf8(merges); bad != std::string::npos) {
    throw DataCorrupted("{}: not UTF-8 at byte {}", merges_path, bad);
  }
  spec.source = merges_path;  // of the merge errors
  MergeReader reader(spec);
  bool first = true;
  for (const std::string_view line : lines_of(merges)) {
    // The first line may name a version; a merge of "#" begins with "# " or "#", never with "#version".
    const bool header = first && line.starts_with("#version");
    first = false;
    if (!header && !line.empty()) reader.add_line(line);
  }
  spec.source = vocab_path;
  if (pattern == KnownPattern::kQwen2) spec.normalizers.push_back(nfc_step());
  use_byte_level(pattern, spec);
  return spec;
}

TokenizerSpec spec_from_tiktoken(const std::string& path, const std::atomic<bool>* cancel) {
  const std::string content = read_file(path, kMaxTokenizerFileBytes);
  TokenizerSpec spec;
  spec.source = path;
  std::vector<std::string> texts;  // raw bytes by rank, which is the id
  for (const std::string_view line : lines_of(content)) {
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    std::string bytes;
    uint32_t rank = 0;
    bool valid = space != std::string_view::npos && decode_base64(line.substr(0, space), bytes);
    if (valid) {
      const auto [end, error] = std::from_chars(line.data() + space + 1, line.data() + line.size(), rank);
      valid = error == std::errc() && end == line.data() + line.size();
    }
    if (!valid) {
      throw DataCorrupted("{}: line {} is not 'base64 rank': {}", path, texts.size() + 1, quote(line));
    }
    if (rank != texts.size()) {
      throw DataCorrupted("{}: line {} has rank {}; ranks must count up from 0", path, texts.size() + 1, rank);
    }
    texts.push_back(std::move(bytes));
  }
  if (texts.size() != static_cast<size_t>(kLlama3Ranks)) {
    throw Unsupported(
        "{}: {} tiktoken ranks; only the Llama 3 vocabulary of {} is known, and a rank file does not say "
        "which pattern it needs",
        path, texts.size(), kLlama3Ranks);
  }
  std::vector<uint32_t> ranks(texts.size());
  for (size_t id = 0; id < texts.size(); ++id) {
    ranks[id] = static_cast<uint32_t>(id);
    spec.vocab.push_back({alphabet_from_bytes(texts[id]), static_cast<int32_t>(id)});
  }
  merges_from_ranks(texts, ranks, true, spec, cancel);
  spec.ignore_merges = true;  // tiktoken looks a whole piece up before it merges
  use_byte_level(KnownPattern::kLlama3, spec);
  for (const std::string& name : llama3_specials()) {
    AddedToken token;
    token.id = kLlama3Ranks + static_cast<int32_t>(spec.added_tokens.size());
    token.content = name;
    token.special = true;
    spec.added_tokens.push_back(std::move(token));
  }
  spec.bos = kLlama3Ranks;
  spec.eos = kLlama3Ranks + 1;
  spec.prefix_ids = {kLlama3Ranks};
  return spec;
}

}  // namespace eadem::io
