// SPDX-License-Identifier: Apache-2.0
//
// TokenizerSpec: the contents of a tokenizer file as plain data. Every reader (tokenizer.json, vocab.json + merges.txt,
// tiktoken, GGUF) produces one, and `Tokenizer` is built from it alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {

// Ids stay below this, so that a hostile file cannot request gigabytes. The largest vocabulary in use is 262144.
constexpr int32_t kMaxVocab = 1 << 21;

// U+2581, which SentencePiece writes for a space.
inline constexpr std::string_view kMetaspace = "\xE2\x96\x81";

struct Pattern {
  enum class Kind { kString, kRegex };
  Kind kind = Kind::kString;
  std::string text;
};

struct NormalizerStep {
  enum class Kind {
    kPrepend,
    kReplace,
    kNfc,
    kNfd,
    kNfkc,
    kNfkd,
    kStrip,
    kLowercase,
    kStripAccents,
    kBert,
    kPrecompiled,
    kSentencePiece,
  };
  Kind kind;
  std::string content;  // kPrepend, kReplace; kPrecompiled, kSentencePiece: the bytes of precompiled_map.h
  Pattern pattern;      // kReplace
  bool strip_left = false, strip_right = false;
  bool clean_text = false, space_chinese = false, strip_accents = false, lowercase = false;  // kBert
  bool longest = false;           // kPrecompiled: SentencePiece's way to match
  bool add_dummy_prefix = false;  // kSentencePiece, as the next two: fields of its NormalizerSpec
  bool remove_extra_whitespaces = false;
  std::vector<std::string> user_defined_symbols;  // left as they are
};

enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
enum class PrependScheme { kAlways, kFirst, kNever };

struct PreTokenizerStep {
  enum class Kind { kByteLevel, kSplit, kMetaspace, kDigits, kWhitespace, kWhitespaceSplit, kPunctuation };
  Kind kind;
  bool add_prefix_space = false, use_regex = false;       // kByteLevel
  Pattern pattern;                                        // kSplit
  SplitBehavior behavior = SplitBehavior::kIsolated;      // kSplit, kPunctuation
  bool invert = false;                                    // kSplit
  std::string replacement;                                // kMetaspace
  PrependScheme prepend_scheme = PrependScheme::kAlways;  // kMetaspace
  bool split = true;                                      // kMetaspace
  bool individual_digits = false;                         // kDigits
};

struct DecoderStep {
  enum class Kind { kByteLevel, kReplace, kByteFallback, kFuse, kStrip, kMetaspace, kWordPiece };
  Kind kind;
  Pattern pattern;              // kReplace
  std::string content;          // kReplace: replacement; kStrip: the character; kWordPiece: what continues a word
  bool cleanup = false;         // kWordPiece: no spaces before punctuation
  int64_t start = 0, stop = 0;  // kStrip
  std::string replacement;      // kMetaspace
  PrependScheme prepend_scheme = PrependScheme::kAlways;  // kMetaspace
};

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;  // dropped by skip_special, not read from text without parse_special
  bool lstrip = false;   // also takes the white space on its left / right
  bool rstrip = false;
  bool single_word = false;  // only between non-word characters
  bool normalized = false;   // searched after normalization, in its normalized form
};

struct VocabEntry {
  std::string text;
  int32_t id;
};

// `left` followed by `right` becomes `result`; the lowest rank goes first, equal ranks left to right.
struct Merge {
  int32_t left, right, result;
  uint32_t rank;
};

struct TokenizerSpec {
  std::string source;  // file name, for messages

  enum class Model { kBpe, kUnigram, kWordPiece };
  Model model = Model::kBpe;
  std::vector<VocabEntry> vocab;  // unique texts and ids; ids may have holes
  std::vector<Merge> merges;      // may name symbols >= kMaxVocab listed in extra_symbols
  // Single characters that no token stands for but that occur inside tokens (SentencePiece vocabularies).
  // The i-th has the internal id kMaxVocab + i and falls back to bytes when no merge takes it.
  std::vector<std::string> extra_symbols;
  bool ignore_merges = false;  // a piece that is a token is not split at all
  bool byte_fallback = false;  // unknown characters become <0xNN> tokens
  bool fuse_unk = false;
  std::string unk_token;  // empty: text that needs it is refused

  // kUnigram
  std::vector<double> scores;     // of each vocabulary entry; NaN: it never comes out of text
  double unk_score = 0;           // of a character without a token
  bool single_precision = false;  // sums of scores are f32, as SentencePiece's are
  // kWordPiece
  std::string continuing_prefix;  // "##"
  size_t max_word_chars = 100;    // a longer word is unknown

  std::vector<NormalizerStep> normalizers;
  std::vector<PreTokenizerStep> pre_tokenizers;
  std::vector<DecoderStep> decoders;
  bool join_with_space = false;  // a tokenizer.json without decoder: tokens are joined by one space
  std::vector<AddedToken> added_tokens;
  bool added_tokens_are_text = false;    // decoders leave added tokens alone (GGUF); in tokenizer.json they do not
  bool added_tokens_are_normal = false;  // what is searched in normalized text is spelt as it stands there
  std::vector<int32_t> prefix_ids, suffix_ids;  // around a sequence when special tokens are asked for

  std::optional<int32_t> bos, eos, unk, pad;
  std::vector<EndToken> end_tokens;
  std::vector<std::string> notes;             // what the file asks for and nothing here does, for `inspect`
  std::vector<NamedTemplate> chat_templates;  // each name once
};

}  // namespace eadem::io
