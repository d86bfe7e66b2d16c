// SPDX-License-Identifier: Apache-2.0
//
// Tokenizer: text to token ids and back. Byte-level BPE (GPT-2, Llama 3, Qwen2 ...), SentencePiece-style BPE with byte
// fallback (Llama 2), unigram models and WordPiece, read from
//
//   tokenizer.json                   the Hugging Face format; the reference for its meaning is their library
//   vocab.json + merges.txt          GPT-2 and Qwen2 checkpoints without tokenizer.json
//   tokenizer.model                  SentencePiece models (BPE and unigram), tiktoken ranks (Llama 3)
//   tiktoken.model                   tiktoken ranks (Kimi)
//   GGUF metadata                    tokenizer.ggml.*, models "gpt2", "llama", "t5" and "gemma4"
//
// Features that a file requests and this code lacks are refused by name (Unsupported). A file that contradicts itself
// is DataCorrupted; a missing one is NotFound.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/named_template.h"
#include "eadem/io/text_segment.h"
#include "eadem/io/tokenizer/pattern_matchers.h"

namespace eadem::io {

class GgufFile;
struct TokenizerSpec;

struct EncodeOptions {
  // Put the tokens of the post-processor (BOS, EOS) around the text.
  bool add_special_tokens = true;
  // Read special tokens such as <|im_end|> from the text. Off for text that a user controls: such strings
  // are then ordinary text. Added tokens that are not special are always read.
  bool parse_special = true;
  // Added tokens, by id in rising order, that are treated as special although their file does not mark them so, such
  // as <think> of Qwen 3 in a conversation.
  std::span<const int32_t> control = {};
  // Once it is set (by any thread, or a signal handler), encode throws Cancelled soon.
  const std::atomic<bool>* cancel = nullptr;
};

// The values of tokenizer.ggml.token_type.
enum class GgufTokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// The tokenizer keys of a GGUF file, unchanged. Optionals are keys that may be missing.
struct GgufTokenizerData {
  std::string source;                // file name, for messages
  std::string name;                  // general.name: see takes_space_behind in files/readers.h
  std::string model;                 // tokenizer.ggml.model: "gpt2", "llama", "t5" or "gemma4"
  std::string pre;                   // tokenizer.ggml.pre: a name of gguf_pre_types.h; only "gpt2" reads it
  std::vector<std::string> tokens;   // index is the id
  std::vector<float> scores;         // "llama": the higher merges first; "t5": log-probabilities
  std::vector<int32_t> token_types;  // GgufTokenType; may be empty
  std::vector<std::string> merges;   // "gpt2": "left right"
  std::optional<int64_t> bos, eos, unk, pad;
  std::optional<int64_t> eot, eom;  // the ends of a turn and of a message
  std::vector<int64_t> eos_ids;     // tokenizer.ggml.eos_token_ids, which some converters write
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  bool remove_extra_whitespaces = false;  // of texts, before anything else looks at them
  std::string precompiled_charsmap;       // see precompiled_map.h; empty: none
  bool of_sentencepiece = false;  // a tokenizer.model, whose meaning is SentencePiece's where llama.cpp's is another
  std::vector<NamedTemplate> chat_templates;
};

// A token that ends an answer, and the key of the tokenizer's file that says so.
struct EndToken {
  int32_t id;
  std::string key;
};

// Immutable after construction: every const member may be called from any thread at once.
class Tokenizer {
 public:
  // `path`: a tokenizer.json, a tokenizer.model, a tiktoken.model, a .gguf, or a directory. In a directory
  // tokenizer.json is preferred, then vocab.json + merges.txt (which need tokenizer_config.json to say which
  // pre-tokenizer they were trained with), then a tokenizer.model, then a tiktoken.model. A tokenizer_config.json
  // beside the file gives bos / eos / unk / pad, chat templates, and add_bos_token / add_eos_token, which when present
  // override the post-processor, as the Hugging Face classes do. A chat_template.jinja beside it takes the place of the
  // config's templates, and additional_chat_templates/NAME.jinja adds others.
  // Once `cancel` is set, reading stops with Cancelled.
  static Tokenizer from_file(const std::string& path, const std::atomic<bool>* cancel = nullptr);
  // The bytes of a tokenizer.json, and of a tokenizer_config.json if not empty. `source` is for messages.
  static Tokenizer from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                             const std::string& source);
  // A vocab.json and a merges.txt with the pre-tokenizer pattern named by the caller.
  static Tokenizer from_vocab_and_merges(const std::string& vocab_path, const std::string& merges_path,
                                         KnownPattern pattern);
  static Tokenizer from_gguf(const GgufTokenizerData& data, const std::atomic<bool>* cancel = nullptr);

  // Builds from a description and checks it.
  explicit Tokenizer(const TokenizerSpec& spec, const std::atomic<bool>* cancel = nullptr);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Throws InvalidArgument, naming the byte offset, when `text` is not UTF-8, when it has 2^31 bytes or more, when it
  // holds a character that the vocabulary cannot express, and when the tokenizer's own normalizers and patterns would
  // need more memory or time than a tokenizer's should (text_work.h has the limits). Time is n log n in the text.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The ids of the segments' joined text, in which special (and control) tokens are read only where they lie in trusted
  // segments.
  // Borders of segments do not show in the ids otherwise: text between special tokens is encoded as one. Throws as
  // above; an offset in a message counts from the first segment.
  std::vector<int32_t> encode(std::span<const TextSegment> segments, const EncodeOptions& options = {}) const;

  // The text of `ids`. Always valid UTF-8: ill-formed parts become U+FFFD. `skip_special` drops special
  // tokens. Throws InvalidArgument on an id that is not a token.
  std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;

  // One more than the largest id. Ids below it need not all be tokens: see is_token.
  int32_t vocab_size() const;
  bool is_token(int64_t id) const;

  // The text of a token as the vocabulary spells it, and its id.
  std::string_view token_text(int32_t id) const;
  std::optional<int32_t> token_to_id(std::string_view text) const;

  // The bytes that a token contributes in the middle of a text. May be part of a UTF-8 sequence.
  std::string_view token_bytes(int32_t id) const;

  bool is_special(int32_t id) const;
  // The tokens that are cut out of a text before anything else, special or not, in rising order.
  std::span<const int32_t> added_ids() const;
  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  std::optional<int32_t> unk() const;
  std::optional<int32_t> pad() const;
  // The tokens that add_special_tokens puts before and after a text.
  std::span<const int32_t> prefix_ids() const;
  std::span<const int32_t> suffix_ids() const;

  // The end tokens that a GGUF file names besides eos. Ids are tokens.
  std::span<const EndToken> end_tokens() const;

  // What the files ask for and nothing here does, such as truncation: sentences for a person.
  std::span<const std::string> notes() const;

  // The chat templates of the files, each name once; the one that is meant without a name is called "default".
  std::span<const NamedTemplate> chat_templates() const;
  // The source of the default one; empty if there is none.
  const std::string& chat_template() const;
  // The name of the tokenizer's file, for messages.
  const std::string& source() const;

 private:
  friend class IncrementalDecoder;
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

// The tokenizer in a GGUF file's metadata.
Tokenizer tokenizer_from_gguf(const GgufFile& file, const std::atomic<bool>* cancel = nullptr);

// Decodes one token at a time and returns text as soon as its UTF-8 is complete. The concatenation of
// every result, finish() last, equals Tokenizer::decode of the same ids. One thread at a time; the
// tokenizer must outlive it.
//
// To stream a continuation, first pass the prompt's ids and drop what comes back: some tokenizers treat
// the first token of a text apart.
class IncrementalDecoder {
 public:
  explicit IncrementalDecoder(const Tokenizer& tokenizer, bool skip_special = true);

  std::string next(int32_t id);
  // Text held back at the end: U+FFFD for an unfinished sequence, else nothing. Starts over.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  bool first_ = true;
  int64_t strip_left_;
  std::string pending_;
};

}  // namespace eadem::io
