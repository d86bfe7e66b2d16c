// SPDX-License-Identifier: Apache-2.0
//
// The readers behind Tokenizer::from_*: file formats to TokenizerSpec. Errors as in tokenizer.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/tokenizer.h"

namespace eadem::io {

// Files of tokenizers are refused above this size.
constexpr int64_t kMaxTokenizerFileBytes = 256 << 20;

// Every path but that of a GGUF file: see Tokenizer::from_file.
TokenizerSpec spec_from_path(const std::string& path, const std::atomic<bool>* cancel = nullptr);

// tokenizer.json.
TokenizerSpec spec_from_json(std::string_view json, const std::string& source);

// The components of a tokenizer.json, read from the keys of its root.
std::vector<NormalizerStep> read_normalizers(const JsonReader& root);
std::vector<PreTokenizerStep> read_pre_tokenizers(const JsonReader& root);
std::vector<DecoderStep> read_decoders(const JsonReader& root);
void read_post_processor(const JsonReader& root, TokenizerSpec& spec);

// Overlays a tokenizer_config.json: see Tokenizer::from_file. Added tokens that only the config lists join
// the spec.
void apply_tokenizer_config(const JsonReader& config, TokenizerSpec& spec);

// vocab.json and merges.txt, byte-level, with the given pattern; NFC first for Qwen2, as its class does.
TokenizerSpec spec_from_vocab_and_merges(const std::string& vocab_path, const std::string& merges_path,
                                         KnownPattern pattern);

// SentencePiece's tokenizer.model: BPE and unigram models. `content` is what lies in the file `source`.
TokenizerSpec spec_from_sentencepiece(std::string_view content, const std::string& source,
                                      const std::atomic<bool>* cancel = nullptr);
// The pieces of a SentencePiece model, as the keys of a GGUF file would state them.
GgufTokenizerData sentencepiece_data(std::string_view content, const std::string& source);
// Whether the bytes of a tokenizer.model are SentencePiece's rather than tiktoken's.
bool is_sentencepiece(std::string_view content);

// Lines of base64 token and rank, which lie in the file `source`. Such lines do not say with which pattern text is cut:
// the ranks of Llama 3 are known by their number and those of Kimi by the class in the tokenizer_config.json beside
// them (null: none is there); others are refused. Special tokens that the config lists are left to
// apply_tokenizer_config.
TokenizerSpec spec_from_tiktoken(std::string_view content, const std::string& source, const JsonReader* config,
                                 const std::atomic<bool>* cancel = nullptr);

TokenizerSpec spec_from_gguf(const GgufTokenizerData& data, const std::atomic<bool>* cancel = nullptr);
// Whether this added token takes the white space behind it. GGUF has no key for that: llama.cpp goes by whether the
// model's name is one of Phi-3, all of whose added tokens do, but for three.
bool takes_space_behind(const GgufTokenizerData& data, std::string_view token);
// The tokenizer keys of a file's metadata.
GgufTokenizerData gguf_tokenizer_data(const GgufFile& file);

// Parses "left right" or a pair of strings into spec.merges, rank by position; used by every merges list.
class MergeReader {
 public:
  // Reads spec.vocab, which must be complete and stay as it is; adds to spec.merges.
  explicit MergeReader(TokenizerSpec& spec);
  ~MergeReader();
  MergeReader(const MergeReader&) = delete;
  MergeReader& operator=(const MergeReader&) = delete;
  void add(std::string_view left, std::string_view right);
  void add_line(std::string_view line);  // "left right"

 private:
  struct Ids;
  TokenizerSpec& spec_;
  std::unique_ptr<Ids> ids_;
};

// Turns every way to write a token as two others into a merge of the token's rank (by id; kNoRank: none). `byte_level`:
// token texts are raw bytes, not UTF-8. Otherwise single characters that are no token but occur in one become
// spec.extra_symbols. Time is N log N in the bytes of all texts, however long one of them is. Throws Cancelled once the
// flag is set.
void merges_from_ranks(const std::vector<std::string>& texts, const std::vector<uint32_t>& rank_by_id, bool byte_level,
                       TokenizerSpec& spec, const std::atomic<bool>* cancel = nullptr);

// Chat templates, each name once: in tokenizer_config.json (a text, or a list of named ones), as files in a folder
// (chat_template.jinja and additional_chat_templates/NAME.jinja; if there are any, those of the config do not count),
// and in a GGUF file (tokenizer.chat_template and tokenizer.chat_template.NAME).
std::vector<NamedTemplate> config_chat_templates(const JsonReader& config);
std::vector<NamedTemplate> folder_chat_templates(const std::string& folder);
std::vector<NamedTemplate> gguf_chat_templates(const GgufFile& file);
// Templates as they are written: to the keys of a GGUF file, and to `chat_template` of tokenizer_config.json.
GgufMetadata gguf_metadata_of(std::span<const NamedTemplate> templates);
JsonValue config_json_of(std::span<const NamedTemplate> templates);

// A character without a token costs so much more than the least likely token, in the unigram models of all libraries.
constexpr double kUnknownPenalty = 10;

// False if `text` is not base64.
bool decode_base64(std::string_view text, std::string& bytes);

NormalizerStep nfc_step();

// The steps of a byte-level tokenizer, as its tokenizer.json would have them: with a known pattern, or with any.
void use_byte_level(KnownPattern pattern, TokenizerSpec& spec);
void use_split_bytes(std::string_view pattern, TokenizerSpec& spec);

}  // namespace eadem::io
