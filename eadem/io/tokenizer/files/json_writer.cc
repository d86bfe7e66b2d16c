// SPDX-License-Identifier: Apache-2.0
//
// TokenizerSpec to tokenizer.json and tokenizer_config.json.
#include <algorithm>
#include <filesystem>
#include <unordered_map>

#include "eadem/core/error.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"

namespace eadem::io {
namespace {

JsonValue typed(const char* type) { return JsonValue::object().set("type", type); }

JsonValue pattern_json(const Pattern& pattern) {
  return JsonValue::object().set(pattern.kind == Pattern::Kind::kRegex ? "Regex" : "String", pattern.text);
}

const char* behavior_name(SplitBehavior behavior) {
  switch (behavior) {
    case SplitBehavior::kRemoved: return "Removed";
    case SplitBehavior::kIsolated: return "Isolated";
    case SplitBehavior::kMergedWithPrevious: return "MergedWithPrevious";
    case SplitBehavior::kMergedWithNext: return "MergedWithNext";
    case SplitBehavior::kContiguous: return "Contiguous";
  }
  EADEM_UNREACHABLE("behavior {}", static_cast<int>(behavior));
}

const char* scheme_name(PrependScheme scheme) {
  switch (scheme) {
    case PrependScheme::kAlways: return "always";
    case PrependScheme::kFirst: return "first";
    case PrependScheme::kNever: return "never";
  }
  EADEM_UNREACHABLE("scheme {}", static_cast<int>(scheme));
}

JsonValue to_json_step(const NormalizerStep& step) {
  using Kind = NormalizerStep::Kind;
  switch (step.kind) {
    case Kind::kPrepend: return typed("Prepend").set("prepend", step.content);
    case Kind::kReplace:
      return typed("Replace").set("pattern", pattern_json(step.pattern)).set("content", step.content);
    case Kind::kNfc: return typed("NFC");
    case Kind::kNfd: return typed("NFD");
    case Kind::kNfkc: return typed("NFKC");
    case Kind::kNfkd: return typed("NFKD");
    case Kind::kStrip: return typed("Strip").set("strip_left", step.strip_left).set("strip_right", step.strip_right);
    case Kind::kLowercase: return typed("Lowercase");
    case Kind::kStripAccents: return typed("StripAccents");
    case Kind::kBert:
      return typed("BertNormalizer")
          .set("clean_text", step.clean_text)
          .set("handle_chinese_chars", step.space_chinese)
          .set("strip_accents", step.strip_accents)
          .set("lowercase", step.lowercase);
    case Kind::kPrecompiled:
    case Kind::kSentencePiece: throw Unsupported("normalizer: a precompiled map is not written to tokenizer.json");
  }
  EADEM_UNREACHABLE("normalizer {}", static_cast<int>(step.kind));
}

JsonValue to_json_step(const PreTokenizerStep& step) {
  using Kind = PreTokenizerStep::Kind;
  switch (step.kind) {
    case Kind::kByteLevel:
      return typed("ByteLevel")
          .set("add_prefix_space", step.add_prefix_space)
          .set("trim_offsets", true)
          .set("use_regex", step.use_regex);
    case Kind::kSplit:
      return typed("Split")
          .set("pattern", pattern_json(step.pattern))
          .set("behavior", behavior_name(step.behavior))
          .set("invert", step.invert);
    case Kind::kMetaspace:
      return typed("Metaspace")
          .set("replacement", step.replacement)
          .set("prepend_scheme", scheme_name(step.prepend_scheme))
          .set("split", step.split);
    case Kind::kDigits: return typed("Digits").set("individual_digits", step.individual_digits);
    case Kind::kWhitespace: return typed("Whitespace");
    case Kind::kWhitespaceSplit: return typed("WhitespaceSplit");
    case Kind::kPunctuation: return typed("Punctuation").set("behavior", behavior_name(step.behavior));
  }
  EADEM_UNREACHABLE("pre-tokenizer {}", static_cast<int>(step.kind));
}

JsonValue to_json_step(const DecoderStep& step) {
  using Kind = DecoderStep::Kind;
  switch (step.kind) {
    case Kind::kByteLevel:
      return typed("ByteLevel").set("add_prefix_space", true).set("trim_offsets", true).set("use_regex", true);
    case Kind::kReplace:
      return typed("Replace").set("pattern", pattern_json(step.pattern)).set("content", step.content);
    case Kind::kByteFallback: return typed("ByteFallback");
    case Kind::kFuse: return typed("Fuse");
    case Kind::kStrip:
      return typed("Strip").set("content", step.content).set("start", step.start).set("stop", step.stop);
    case Kind::kMetaspace:
      return typed("Metaspace")
          .set("replacement", step.replacement)
          .set("prepend_scheme", scheme_name(step.prepend_scheme))
          .set("split", true);
    case Kind::kWordPiece: return typed("WordPiece").set("prefix", step.content).set("cleanup", step.cleanup);
  }
  EADEM_UNREACHABLE("decoder {}", static_cast<int>(step.kind));
}

// null, the only step, or a Sequence.
template <typename Step>
JsonValue to_json_steps(const std::vector<Step>& steps, const char* list_key) {
  if (steps.empty()) return nullptr;
  if (steps.size() == 1) return to_json_step(steps[0]);
  JsonValue list = JsonValue::array();
  for (const Step& step : steps) list.push_back(to_json_step(step));
  return typed("Sequence").set(list_key, std::move(list));
}

using Texts = std::unordered_map<int32_t, std::string>;

JsonValue post_processor_json(const TokenizerSpec& spec, const Texts& texts) {
  if (spec.prefix_ids.empty() && spec.suffix_ids.empty()) return nullptr;
  JsonValue specials = JsonValue::object();
  const auto special = [&](int32_t id, int type_id) {
    const std::string& text = texts.at(id);
    specials.set(text, JsonValue::object()
                           .set("id", text)
                           .set("ids", JsonValue::array().push_back(id))
                           .set("tokens", JsonValue::array().push_back(text)));
    return JsonValue::object().set("SpecialToken", JsonValue::object().set("id", text).set("type_id", type_id));
  };
  const auto append = [&](JsonValue& list, const char* sequence, int type_id) {
    for (const int32_t id : spec.prefix_ids) list.push_back(special(id, type_id));
    list.push_back(
        JsonValue::object().set("Sequence", JsonValue::object().set("id", sequence).set("type_id", type_id)));
    for (const int32_t id : spec.suffix_ids) list.push_back(special(id, type_id));
  };
  JsonValue single = JsonValue::array(), pair = JsonValue::array();
  append(single, "A", 0);
  append(pair, "A", 0);
  append(pair, "B", 1);
  return typed("TemplateProcessing")
      .set("single", std::move(single))
      .set("pair", std::move(pair))
      .set("special_tokens", std::move(specials));
}

JsonValue model_json(const TokenizerSpec& spec, const Texts& texts) {
  std::vector<const VocabEntry*> by_id;
  for (const VocabEntry& entry : spec.vocab) by_id.push_back(&entry);
  std::sort(by_id.begin(), by_id.end(), [](const VocabEntry* a, const VocabEntry* b) { return a->id < b->id; });
  JsonValue::Object vocab;
  for (const VocabEntry* entry : by_id) vocab.push_back({entry->text, entry->id});
  JsonValue merges = JsonValue::array();
  for (size_t i = 0; i < spec.merges.size(); ++i) {
    const Merge& merge = spec.merges[i];
    if (i > 0 && merge.rank <= spec.merges[i - 1].rank) {
      throw Unsupported("{}: merges that are not in order of distinct ranks have no form in tokenizer.json",
                        spec.source);
    }
    merges.push_back(JsonValue::array().push_back(texts.at(merge.left)).push_back(texts.at(merge.right)));
  }
  return typed("BPE")
      .set("dropout", nullptr)
      .set("unk_token", spec.unk_token.empty() ? JsonValue() : JsonValue(spec.unk_token))
      .set("continuing_subword_prefix", nullptr)
      .set("end_of_word_suffix", nullptr)
      .set("fuse_unk", spec.fuse_unk)
      .set("byte_fallback", spec.byte_fallback)
      .set("ignore_merges", spec.ignore_merges)
      .set("vocab", JsonValue(std::move(vocab)))
      .set("merges", std::move(merges));
}

}  // namespace

std::string to_tokenizer_json(const TokenizerSpec& spec) {
  if (spec.model != TokenizerSpec::Model::kBpe)
    throw Unsupported("{}: only BPE models are written to tokenizer.json", spec.source);
  if (!spec.extra_symbols.empty()) {
    throw Unsupported("{}: {} characters occur only inside tokens, which tokenizer.json cannot express", spec.source,
                      spec.extra_symbols.size());
  }
  Texts texts;
  for (const VocabEntry& entry : spec.vocab) texts.emplace(entry.id, entry.text);
  JsonValue added = JsonValue::array();
  for (const AddedToken& token : spec.added_tokens) {
    texts.emplace(token.id, token.content);
    added.push_back(JsonValue::object()
                        .set("id", token.id)
                        .set("content", token.content)
                        .set("single_word", token.single_word)
                        .set("lstrip", token.lstrip)
                        .set("rstrip", token.rstrip)
                        .set("normalized", token.normalized)
                        .set("special", token.special));
  }
  return to_json(JsonValue::object()
                     .set("version", "1.0")
                     .set("truncation", nullptr)
                     .set("padding", nullptr)
                     .set("added_tokens", std::move(added))
                     .set("normalizer", to_json_steps(spec.normalizers, "normalizers"))
                     .set("pre_tokenizer", to_json_steps(spec.pre_tokenizers, "pretokenizers"))
                     .set("post_processor", post_processor_json(spec, texts))
                     .set("decoder", to_json_steps(spec.decoders, "decoders"))
                     .set("model", model_json(spec, texts))) +
         "\n";
}

std::string to_tokenizer_config_json(const TokenizerSpec& spec) {
  const auto text_of = [&](const std::optional<int32_t>& id) -> JsonValue {
    if (!id) return nullptr;
    for (const VocabEntry& entry : spec.vocab) {
      if (entry.id == *id) return entry.text;
    }
    for (const AddedToken& token : spec.added_tokens) {
      if (token.id == *id) return token.content;
    }
    EADEM_UNREACHABLE("id {} is in no list", *id);
  };
  JsonValue config = JsonValue::object()
                         .set("tokenizer_class", "PreTrainedTokenizerFast")
                         .set("clean_up_tokenization_spaces", false)
                         .set("bos_token", text_of(spec.bos))
                         .set("eos_token", text_of(spec.eos))
                         .set("unk_token", text_of(spec.unk))
                         .set("pad_token", text_of(spec.pad));
  if (!spec.chat_templates.empty()) config.set("chat_template", config_json_of(spec.chat_templates));
  return to_json(config) + "\n";
}

void save_tokenizer(const TokenizerSpec& spec, const std::string& directory) {
  const std::filesystem::path folder = directory;
  write_file_atomically((folder / "tokenizer.json").string(), to_tokenizer_json(spec));
  write_file_atomically((folder / "tokenizer_config.json").string(), to_tokenizer_config_json(spec));
}

}  // namespace eadem::io
