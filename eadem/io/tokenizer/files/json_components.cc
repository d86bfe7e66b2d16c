// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

[[noreturn]] void refuse(const JsonReader& reader, std::string_view component, std::string_view what) {
  throw Unsupported("{}: {}: {} is not supported", reader.file(), component, what);
}

// A component, or the components of a Sequence in order. `list_key` holds a Sequence's children.
void flatten(const JsonReader& component, std::string_view list_key, std::vector<JsonReader>& out) {
  if (component.string("type") != "Sequence") {
    out.push_back(component);
    return;
  }
  // Sequences nest no deeper than the document may.
  for (const JsonReader& child : component.elements(list_key)) flatten(child, list_key, out);
}

std::vector<JsonReader> read_sequence(const JsonReader& root, std::string_view key, std::string_view list_key) {
  std::vector<JsonReader> out;
  if (const auto component = root.optional_object(key)) flatten(*component, list_key, out);
  return out;
}

Pattern read_pattern(const JsonReader& step) {
  const JsonReader pattern = step.object("pattern");
  if (pattern.has("String")) return {Pattern::Kind::kString, pattern.string("String")};
  return {Pattern::Kind::kRegex, pattern.string("Regex")};
}

SplitBehavior read_behavior(const JsonReader& step) {
  const std::string& name = step.string("behavior");
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  refuse(step, "pre_tokenizer", "split behavior " + quote(name));
}

// Metaspace stands for three generations of files: `prepend_scheme`, or before it `add_prefix_space`.
void read_metaspace(const JsonReader& step, std::string& replacement, PrependScheme& scheme, bool& split) {
  replacement = step.string("replacement");
  if (replacement.empty()) step.fail("replacement", "a character");
  const auto name = step.optional_string("prepend_scheme");
  const auto add_prefix_space = step.optional_boolean("add_prefix_space");
  const auto str_rep = step.optional_string("str_rep");
  if (str_rep && *str_rep != replacement) refuse(step, "Metaspace", "a str_rep other than the replacement");
  split = step.optional_boolean("split").value_or(true);
  if (!name) {
    scheme = add_prefix_space.value_or(true) ? PrependScheme::kAlways : PrependScheme::kNever;
  } else if (*name == "always") {
    scheme = PrependScheme::kAlways;
  } else if (*name == "first") {
    scheme = PrependScheme::kFirst;
  } else if (*name == "never") {
    scheme = PrependScheme::kNever;
  } else {
    refuse(step, "Metaspace", "prepend_scheme " + quote(*name));
  }
  if (name && add_prefix_space && *add_prefix_space == (scheme == PrependScheme::kNever)) {
    throw DataCorrupted("{}: Metaspace: add_prefix_space {} contradicts prepend_scheme '{}'", step.file(),
                        *add_prefix_space, *name);
  }
}

// A pair of a token and its id.
int32_t end_of(const JsonReader& step, std::string_view key) {
  const JsonValue* value = step.raw(key);
  if (value == nullptr || !value->is_array() || value->as_array().size() != 2 ||
      value->as_array()[1].kind() != JsonValue::Kind::integer || value->as_array()[1].as_integer() < 0 ||
      value->as_array()[1].as_integer() >= kMaxVocab)
    step.fail(key, "a token and its id");
  return static_cast<int32_t>(value->as_array()[1].as_integer());
}

}  // namespace

std::vector<NormalizerStep> read_normalizers(const JsonReader& root) {
  using Kind = NormalizerStep::Kind;
  std::vector<NormalizerStep> steps;
  for (const JsonReader& reader : read_sequence(root, "normalizer", "normalizers")) {
    const std::string& type = reader.string("type");
    NormalizerStep step{};
    if (type == "Prepend") {
      step.kind = Kind::kPrepend;
      step.content = reader.string("prepend");
    } else if (type == "Replace") {
      step.kind = Kind::kReplace;
      step.pattern = read_pattern(reader);
      step.content = reader.string("content");
    } else if (type == "NFC") {
      step.kind = Kind::kNfc;
    } else if (type == "NFD") {
      step.kind = Kind::kNfd;
    } else if (type == "NFKC") {
      step.kind = Kind::kNfkc;
    } else if (type == "NFKD") {
      step.kind = Kind::kNfkd;
    } else if (type == "Strip") {
      step.kind = Kind::kStrip;
      step.strip_left = reader.boolean("strip_left");
      step.strip_right = reader.boolean("strip_right");
    } else if (type == "Lowercase") {
      step.kind = Kind::kLowercase;
    } else if (type == "StripAccents") {
      step.kind = Kind::kStripAccents;
    } else if (type == "BertNormalizer") {
      step.kind = Kind::kBert;
      step.clean_text = reader.boolean("clean_text");
      step.space_chinese = reader.boolean("handle_chinese_chars");
      step.lowercase = reader.boolean("lowercase");
      step.strip_accents = reader.optional_boolean("strip_accents").value_or(step.lowercase);
    } else if (type == "Precompiled") {
      step.kind = Kind::kPrecompiled;
      if (!reader.has("precompiled_charsmap")) continue;  // no rules
      if (!decode_base64(reader.string("precompiled_charsmap"), step.content))
        reader.fail("precompiled_charsmap", "base64");
    } else {
      refuse(reader, "normalizer", quote(type));
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

std::vector<PreTokenizerStep> read_pre_tokenizers(const JsonReader& root) {
  using Kind = PreTokenizerStep::Kind;
  std::vector<PreTokenizerStep> steps;
  for (const JsonReader& reader : read_sequence(root, "pre_tokenizer", "pretokenizers")) {
    const std::string& type = reader.string("type");
    PreTokenizerStep step{};
    if (type == "ByteLevel") {
      step.kind = Kind::kByteLevel;
      step.add_prefix_space = reader.boolean("add_prefix_space");
      step.use_regex = reader.optional_boolean("use_regex").value_or(true);
      reader.ignore("trim_offsets");  // moves offsets, not tokens
    } else if (type == "Split") {
      step.kind = Kind::kSplit;
      step.pattern = read_pattern(reader);
      step.behavior = read_behavior(reader);
      step.invert = reader.boolean("invert");
    } else if (type == "Metaspace") {
      step.kind = Kind::kMetaspace;
      read_metaspace(reader, step.replacement, step.prepend_scheme, step.split);
    } else if (type == "Digits") {
      step.kind = Kind::kDigits;
      step.individual_digits = reader.boolean("individual_digits");
    } else if (type == "BertPreTokenizer") {
      step.kind = Kind::kWhitespaceSplit;
      steps.push_back(step);
      step.kind = Kind::kPunctuation;
    } else if (type == "Whitespace") {
      step.kind = Kind::kWhitespace;
    } else if (type == "WhitespaceSplit") {
      step.kind = Kind::kWhitespaceSplit;
    } else if (type == "Punctuation") {
      step.kind = Kind::kPunctuation;
      if (reader.has("behavior")) step.behavior = read_behavior(reader);
    } else {
      refuse(reader, "pre_tokenizer", quote(type));
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

std::vector<DecoderStep> read_decoders(const JsonReader& root) {
  using Kind = DecoderStep::Kind;
  std::vector<DecoderStep> steps;
  for (const JsonReader& reader : read_sequence(root, "decoder", "decoders")) {
    const std::string& type = reader.string("type");
    DecoderStep step{};
    if (type == "ByteLevel") {
      step.kind = Kind::kByteLevel;
      for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) reader.ignore(key);  // of the encoder
    } else if (type == "Replace") {
      step.kind = Kind::kReplace;
      step.pattern = read_pattern(reader);
      step.content = reader.string("content");
    } else if (type == "ByteFallback") {
      step.kind = Kind::kByteFallback;
    } else if (type == "Fuse") {
      step.kind = Kind::kFuse;
    } else if (type == "Strip") {
      step.kind = Kind::kStrip;
      step.content = reader.string("content");
      if (step.content.empty()) reader.fail("content", "a character");
      step.start = reader.integer("start", 0, 1 << 20);
      step.stop = reader.integer("stop", 0, 1 << 20);
    } else if (type == "Metaspace") {
      step.kind = Kind::kMetaspace;
      bool split = true;  // of the encoder
      read_metaspace(reader, step.replacement, step.prepend_scheme, split);
    } else if (type == "WordPiece") {
      step.kind = Kind::kWordPiece;
      step.content = reader.string("prefix");
      step.cleanup = reader.boolean("cleanup");
    } else {
      refuse(reader, "decoder", quote(type));
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

void read_post_processor(const JsonReader& root, TokenizerSpec& spec) {
  bool seen_template = false;
  for (const JsonReader& reader : read_sequence(root, "post_processor", "processors")) {
    const std::string& type = reader.string("type");
    if (type == "ByteLevel") {
      // Trims offsets; tokens stay as they are.
      for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) reader.ignore(key);
      continue;
    }
    const bool pair_of_ends = type == "BertProcessing" || type == "RobertaProcessing";
    if (type != "TemplateProcessing" && !pair_of_ends) refuse(reader, "post_processor", quote(type));
    if (seen_template) refuse(reader, "post_processor", "a second TemplateProcessing");
    seen_template = true;
    if (pair_of_ends) {
      for (const char* key : {"add_prefix_space", "trim_offsets"}) reader.ignore(key);
      spec.prefix_ids.push_back(end_of(reader, "cls"));
      spec.suffix_ids.push_back(end_of(reader, "sep"));
      continue;
    }
    reader.ignore("pair");  // for two sequences at once, which nothing here encodes
    const auto members = reader.object("special_tokens").members();
    std::map<std::string_view, const JsonReader*> specials;
    for (const auto& [text, special] : members) specials.emplace(text, &special);
    bool after = false;
    for (const JsonReader& item : reader.elements("single")) {
      if (item.has("Sequence")) {
        const JsonReader sequence = item.object("Sequence");
        sequence.ignore("type_id");
        if (sequence.string("id") != "A") sequence.fail("id", "'A'");
        if (after) refuse(reader, "post_processor", "a template with the sequence twice");
        after = true;
        continue;
      }
      const JsonReader token = item.object("SpecialToken");
      token.ignore("type_id");
      const auto special = specials.find(token.string("id"));
      if (special == specials.end()) token.fail("id", "a key of special_tokens");
      for (const int64_t id : special->second->integers("ids", 0, kMaxVocab - 1)) {
        (after ? spec.suffix_ids : spec.prefix_ids).push_back(static_cast<int32_t>(id));
      }
    }
    if (!after) reader.fail("single", "a template with a Sequence");
    reader.ignore("special_tokens");  // those that `single` does not use, and the redundant `tokens`
  }
}

}  // namespace eadem::io
