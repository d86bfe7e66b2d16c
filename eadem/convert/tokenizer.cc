// SPDX-License-Identifier: Apache-2.0
#include "eadem/convert/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/tokenizer/files/gguf_pre_types.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "eadem/io/tokenizer/pre_tokenizer.h"
#include "eadem/io/tokenizer/text_work.h"

namespace eadem::convert {

namespace {

using io::GgufTokenizerData;
using io::GgufValue;
using io::Tokenizer;
using io::TokenizerSpec;

// Returns the GGUF name of a pre-tokenizer that cuts the texts into the same pieces as the spec's; empty if there is
// none. Of several it is the first that takes pieces that are tokens whole where the spec does, and else the first.
std::string_view pre_of(const TokenizerSpec& spec, std::span<const std::string> texts) {
  const io::PreTokenizer own(spec.pre_tokenizers, spec.source);
  if (!own.byte_level()) return {};
  const auto cut = [](const io::PreTokenizer& pre_tokenizer, const std::string& text) {
    io::PreTokenized pre{.text = text, .pieces = {}};
    io::TextWork work(text.size());
    pre_tokenizer.apply(pre, work);
    return pre;
  };
  std::vector<io::PreTokenized> wanted;
  for (const std::string& text : texts) wanted.push_back(cut(own, text));
  std::string_view found;
  for (const io::GgufPreType& type : io::gguf_pre_types()) {
    if (!type.byte_level || (!found.empty() && type.ignore_merges != spec.ignore_merges)) continue;
    const io::PreTokenizer pre_tokenizer(io::steps_of(type), spec.source);
    const auto agrees = [&](const io::PreTokenized& pre, const std::string& text) {
      const io::PreTokenized given = cut(pre_tokenizer, text);
      return pre.text == given.text && std::ranges::equal(pre.pieces, given.pieces, [](const auto& x, const auto& y) {
               return x.begin == y.begin && x.end == y.end;
             });
    };
    if (!std::equal(wanted.begin(), wanted.end(), texts.begin(), agrees)) continue;
    if (type.ignore_merges == spec.ignore_merges) return type.name;
    found = type.name;
  }
  return found;
}

// `pre` names the pre-tokenizer of a byte-level vocabulary; it is empty for others. `pieces`: those of SentencePiece
// that the spec was made of, or null.
GgufTokenizerData data_of(const TokenizerSpec& spec, const GgufTokenizerData* pieces, const std::string& name,
                          std::string_view pre, int64_t vocab) {
  using Type = io::GgufTokenType;
  constexpr auto kUnused = static_cast<int32_t>(Type::kUnused);
  GgufTokenizerData data = pieces != nullptr ? *pieces : GgufTokenizerData{};
  const size_t num_pieces = data.tokens.size();
  data.of_sentencepiece = false;
  data.source = spec.source;
  data.name = name;
  data.chat_templates = spec.chat_templates;
  const auto size = static_cast<size_t>(vocab);
  if (num_pieces > size) throw DataCorrupted("{}: has {} tokens; the model has {}", spec.source, num_pieces, vocab);
  data.tokens.resize(size);
  data.token_types.resize(size, kUnused);
  std::map<int32_t, std::string> texts;
  const auto put = [&](int32_t id, const std::string& text, Type type) {
    if (id < 0 || id >= vocab)
      throw DataCorrupted("{}: token {} is {}; the model has {} tokens", spec.source, text, id, vocab);
    data.tokens[static_cast<size_t>(id)] = text;
    data.token_types[static_cast<size_t>(id)] = static_cast<int32_t>(type);
    texts[id] = text;
  };
  if (spec.model != TokenizerSpec::Model::kBpe && pieces == nullptr)
    throw Unsupported("{}: of tokenizer.json only BPE models are written to GGUF", spec.source);
  const bool byte_level = !pre.empty();
  for (const io::VocabEntry& entry : spec.vocab) {
    if (static_cast<size_t>(entry.id) < num_pieces) continue;
    const bool byte = !byte_level && spec.byte_fallback && entry.text.size() == 6 && entry.text.starts_with("<0x");
    put(entry.id, entry.text, byte ? Type::kByte : Type::kNormal);
  }
  for (const io::AddedToken& token : spec.added_tokens) {
    if (token.lstrip || token.single_word)
      throw Unsupported("{}: added token {} takes spaces before it or whole words only, which GGUF cannot say",
                        spec.source, token.content);
    if (token.rstrip != io::takes_space_behind(data, token.content))
      throw Unsupported(
          "{}: added token {} {} the white space behind it. Readers of GGUF files decide that by whether the "
          "model's name has phi-3 or phi3 in it; that of the directory is '{}'",
          spec.source, token.content, token.rstrip ? "takes" : "does not take", name);
    if (static_cast<size_t>(token.id) < num_pieces && data.tokens[static_cast<size_t>(token.id)] == token.content)
      continue;
    put(token.id, token.content,
        !token.special                                   ? Type::kUserDefined
        : !byte_level && token.content == spec.unk_token ? Type::kUnknown
                                                         : Type::kControl);
  }
  for (size_t id = 0; id < size; ++id)
    if (data.token_types[id] == kUnused && id >= num_pieces) data.tokens[id] = fmt::format("[PAD{}]", id);

  if (pieces != nullptr) {
    data.scores.resize(size, std::numeric_limits<float>::lowest());
  } else if (byte_level) {
    data.model = "gpt2";
    data.pre = pre;
    for (const io::Merge& merge : spec.merges) {
      const std::string &left = texts.at(merge.left), &right = texts.at(merge.right);
      if (left.find(' ') != std::string::npos || right.find(' ') != std::string::npos)
        throw Unsupported("{}: a merge of tokens with spaces, which GGUF cannot say", spec.source);
      data.merges.push_back(left + " " + right);
    }
  } else if (spec.byte_fallback) {
    data.model = "llama";
    // Such a vocabulary has its ids in the order of its merges: the scores state that order.
    for (size_t id = 0; id < size; ++id) data.scores.push_back(-static_cast<float>(id));
    const bool prepends = std::any_of(spec.normalizers.begin(), spec.normalizers.end(),
                                      [](const auto& step) { return step.kind == io::NormalizerStep::Kind::kPrepend; });
    data.add_space_prefix = prepends || !spec.pre_tokenizers.empty();
  } else {
    throw Unsupported(
        "{}: a tokenizer that is neither byte-level BPE that cuts texts in a way that GGUF has a name for "
        "(docs/tokenizers.md) "
        "nor BPE with byte fallback; GGUF has no form for it here",
        spec.source);
  }
  data.bos = spec.bos;
  data.eos = spec.eos;
  data.unk = spec.unk;
  data.pad = spec.pad;
  const auto is = [](const std::vector<int32_t>& ids, std::optional<int32_t> token) {
    return ids.size() == 1 && token == ids[0];
  };
  if ((!spec.prefix_ids.empty() && !is(spec.prefix_ids, spec.bos)) ||
      (!spec.suffix_ids.empty() && !is(spec.suffix_ids, spec.eos)))
    throw Unsupported("{}: puts other tokens around texts than one BOS and EOS, which GGUF cannot say", spec.source);
  data.add_bos = !spec.prefix_ids.empty();
  data.add_eos = !spec.suffix_ids.empty();
  return data;
}

}  // namespace

io::GgufMetadata gguf_tokenizer_of(const std::string& directory, const std::string& name, int64_t vocab,
                                   const std::function<void(const std::string&)>& note) {
  TokenizerSpec spec = io::spec_from_path(directory);
  if (std::erase_if(spec.normalizers, [](const auto& step) { return step.kind == io::NormalizerStep::Kind::kNfc; }) > 0)
    note(
        fmt::format("warning: {} normalizes texts to NFC, which GGUF cannot say: letters that are written as two "
                    "characters, as e and an accent, are read as they stand",
                    spec.source));
  const Tokenizer tokenizer(spec);
  std::optional<GgufTokenizerData> pieces;
  if (std::ranges::any_of(spec.normalizers,
                          [](const auto& step) { return step.kind == io::NormalizerStep::Kind::kSentencePiece; }))
    pieces = io::sentencepiece_data(
        io::read_file((std::filesystem::path(directory) / "tokenizer.model").string(), io::kMaxTokenizerFileBytes),
        spec.source);
  const std::string_view pre = pieces ? std::string_view() : pre_of(spec, io::tokenizer_probes(tokenizer));
  const GgufTokenizerData data = data_of(spec, pieces ? &*pieces : nullptr, name, pre, vocab);
  io::require_same_tokens(tokenizer, Tokenizer::from_gguf(data), "GGUF");

  io::GgufMetadata metadata;
  const auto key = [](const char* last) { return std::string("tokenizer.ggml.") + last; };
  metadata.emplace_back(key("model"), GgufValue::string(data.model));
  metadata.emplace_back(key("pre"), GgufValue::string(data.pre.empty() ? "default" : data.pre));
  metadata.emplace_back(key("tokens"), GgufValue::strings(data.tokens));
  if (!data.scores.empty())
    metadata.emplace_back(key("scores"), GgufValue::scalars(std::span<const float>(data.scores)));
  metadata.emplace_back(key("token_type"), GgufValue::scalars(std::span<const int32_t>(data.token_types)));
  if (!data.merges.empty()) metadata.emplace_back(key("merges"), GgufValue::strings(data.merges));
  for (const auto& [id_key, id] : {std::pair{"bos_token_id", data.bos},
                                   {"eos_token_id", data.eos},
                                   {"unknown_token_id", data.unk},
                                   {"padding_token_id", data.pad}})
    if (id) metadata.emplace_back(key(id_key), GgufValue::scalar(static_cast<uint32_t>(*id)));
  metadata.emplace_back(key("add_bos_token"), GgufValue::boolean(*data.add_bos));
  metadata.emplace_back(key("add_eos_token"), GgufValue::boolean(*data.add_eos));
  if (data.add_space_prefix) metadata.emplace_back(key("add_space_prefix"), GgufValue::boolean(*data.add_space_prefix));
  if (data.remove_extra_whitespaces) metadata.emplace_back(key("remove_extra_whitespaces"), GgufValue::boolean(true));
  if (!data.precompiled_charsmap.empty()) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(data.precompiled_charsmap.data());
    metadata.emplace_back(key("precompiled_charsmap"),
                          GgufValue::scalars(std::span(bytes, data.precompiled_charsmap.size())));
  }
  for (auto& member : io::gguf_metadata_of(data.chat_templates)) metadata.push_back(std::move(member));
  return metadata;
}

}  // namespace eadem::convert
