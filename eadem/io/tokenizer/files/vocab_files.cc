// SPDX-License-Identifier: Apache-2.0
//
// Vocabularies outside tokenizer.json: vocab.json + merges.txt, and tiktoken ranks.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/gguf_pre_types.h"
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

// The classes of Kimi and Moonlight, which have one pattern.
// Source: tokenization_kimi.py of Kimi-K2-Instruct and of Kimi-Linear-48B-A3B-Instruct.
constexpr std::string_view kKimiClasses[] = {"tokenization_kimi.TikTokenTokenizer",
                                             "tokenization_moonshot.TikTokenTokenizer"};
constexpr int32_t kKimiSpecials = 256;

// The tokens of a rank file as raw bytes, by rank, which is the id.
std::vector<std::string> read_ranks(std::string_view content, const std::string& source) {
  std::vector<std::string> texts;
  StringMap<size_t> line_of;
  size_t number = 0;
  for (const std::string_view line : lines_of(content)) {
    ++number;
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    std::string bytes;
    uint32_t rank = 0;
    bool valid = space != std::string_view::npos && decode_base64(line.substr(0, space), bytes);
    if (valid) {
      const auto [end, error] = std::from_chars(line.data() + space + 1, line.data() + line.size(), rank);
      valid = error == std::errc() && end == line.data() + line.size();
    }
    if (!valid) throw DataCorrupted("{}: line {} is not 'base64 rank': {}", source, number, quote(line));
    if (rank != texts.size()) {
      throw DataCorrupted("{}: line {} has rank {}; expected {}, as ranks count up from 0", source, number, rank,
                          texts.size());
    }
    if (const auto [known, is_new] = line_of.emplace(bytes, number); !is_new) {
      throw DataCorrupted("{}: line {} gives rank {} to the token {}, which line {} has", source, number, rank,
                          quote(bytes), known->second);
    }
    texts.push_back(std::move(bytes));
  }
  if (texts.empty()) throw DataCorrupted("{}: no line has a rank", source);
  return texts;
}

// The Python class beside a model that transformers reads its tokenizer with, such as
// "tokenization_kimi.TikTokenTokenizer"; empty if there is none. The first of two is the one without the `tokenizers`
// package. A name of a repository before it is left out.
std::string class_of_model_code(const JsonReader& config) {
  const auto map = config.optional_object("auto_map");
  const JsonValue* value = map && map->has("AutoTokenizer") ? map->raw("AutoTokenizer") : nullptr;
  if (value != nullptr && value->is_array() && !value->as_array().empty()) value = &value->as_array()[0];
  if (value == nullptr || !value->is_string()) return {};
  const std::string& name = value->as_string();
  const size_t repository = name.rfind("--");
  return repository == std::string::npos ? name : name.substr(repository + 2);
}

void add_special(int32_t id, std::string content, TokenizerSpec& spec) {
  AddedToken token;
  token.id = id;
  token.content = std::move(content);
  token.special = true;
  spec.added_tokens.push_back(std::move(token));
}

void use_llama3(TokenizerSpec& spec) {
  use_byte_level(KnownPattern::kLlama3, spec);
  int32_t id = kLlama3Ranks;
  for (std::string& name : llama3_specials()) add_special(id++, std::move(name), spec);
  spec.bos = kLlama3Ranks;
  spec.eos = kLlama3Ranks + 1;
  spec.prefix_ids = {kLlama3Ranks};
}

// The 256 ids behind the ranks are special: those that the config does not name have a name that tells their id.
void use_kimi(const JsonReader& config, TokenizerSpec& spec) {
  use_split_bytes(find_gguf_pre_type("kimi-k2")->patterns[0], spec);
  spec.added_tokens_are_text = true;
  StringMap<bool> named;
  if (const auto added = config.optional_object("added_tokens_decoder")) {
    for (const JsonMember& member : added->value().as_object()) named.emplace(member.key, true);
  }
  const auto ranks = static_cast<int32_t>(spec.vocab.size());
  for (int32_t id = ranks; id < ranks + kKimiSpecials; ++id) {
    if (!named.contains(std::to_string(id))) add_special(id, fmt::format("<|reserved_token_{}|>", id), spec);
  }
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

void use_split_bytes(std::string_view pattern, TokenizerSpec& spec) {
  PreTokenizerStep split{};
  split.kind = PreTokenizerStep::Kind::kSplit;
  split.pattern = {Pattern::Kind::kRegex, std::string(pattern)};
  spec.pre_tokenizers.push_back(std::move(split));
  PreTokenizerStep bytes{};
  bytes.kind = PreTokenizerStep::Kind::kByteLevel;
  spec.pre_tokenizers.push_back(std::move(bytes));
  DecoderStep decoder{};
  decoder.kind = DecoderStep::Kind::kByteLevel;
  spec.decoders.push_back(std::move(decoder));
}

void use_byte_level(KnownPattern pattern, TokenizerSpec& spec) {
  use_split_bytes(pattern_text(pattern), spec);
  if (pattern != KnownPattern::kGpt2) return;
  spec.pre_tokenizers.erase(spec.pre_tokenizers.end() - 2);
  spec.pre_tokenizers.back().use_regex = true;
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

TokenizerSpec spec_from_tiktoken(std::string_view content, const std::string& source, const JsonReader* config,
                                 const std::atomic<bool>* cancel) {
  TokenizerSpec spec;
  spec.source = source;
  const std::vector<std::string> texts = read_ranks(content, source);
  const std::string kimi_class = config == nullptr ? "" : class_of_model_code(*config);
  const bool is_kimi =
      std::find(std::begin(kKimiClasses), std::end(kKimiClasses), kimi_class) != std::end(kKimiClasses);
  if (!is_kimi && texts.size() != static_cast<size_t>(kLlama3Ranks)) {
    throw Unsupported(
        "{}: {} tiktoken ranks, which do not say which pattern they need; known are the {} of Llama 3, and those of "
        "Kimi beside a tokenizer_config.json whose auto_map names {}; it names {}",
        source, texts.size(), kLlama3Ranks, fmt::join(kKimiClasses, " or "),
        kimi_class.empty() ? "no class" : quote(kimi_class));
  }
  std::vector<uint32_t> ranks(texts.size());
  for (size_t id = 0; id < texts.size(); ++id) {
    ranks[id] = static_cast<uint32_t>(id);
    spec.vocab.push_back({alphabet_from_bytes(texts[id]), static_cast<int32_t>(id)});
  }
  merges_from_ranks(texts, ranks, true, spec, cancel);
  spec.ignore_merges = true;  // tiktoken looks a whole piece up before it merges
  if (is_kimi) {
    use_kimi(*config, spec);
  } else {
    use_llama3(spec);
  }
  return spec;
}

}  // namespace eadem::io
