// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/added_tokens.h"
#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/models/token_model.h"
#include "eadem/io/tokenizer/normalizer.h"
#include "eadem/io/tokenizer/pre_tokenizer.h"
#include "eadem/io/tokenizer/text_work.h"
#include "eadem/io/tokenizer/token_decoder.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

// Remembers where the output holds the ids of recent pieces, so that a repeated word is copied instead of merged again.
// It lives for one section of one call and is direct-mapped, hence bounded.
class PieceCache {
 public:
  struct Entry {
    std::string_view piece;
    size_t begin = 0, count = 0;
  };
  Entry& slot(std::string_view piece) { return entries_[std::hash<std::string_view>{}(piece) % kEntries]; }

  // Below this the cache costs more than it saves.
  static constexpr size_t kMinText = 2048;
  static constexpr size_t kMaxPiece = 32;

 private:
  static constexpr size_t kEntries = 1 << 14;
  std::vector<Entry> entries_ = std::vector<Entry>(kEntries);
};

// Cuts pieces before each U+2581 that follows another character; see TokenModel::splits_at_metaspace.
void split_at_metaspace(PreTokenized& pre, TextWork& work) {
  std::vector<PreTokenized::Range> pieces;
  for (const PreTokenized::Range range : pre.pieces) {
    const std::string_view text = std::string_view(pre.text).substr(0, range.end);
    size_t begin = range.begin;
    size_t after_mark = range.begin;  // the end of the mark seen last
    for (size_t at; (at = text.find(kMetaspace, after_mark)) != std::string::npos;) {
      work.tick();
      if (at != after_mark && at != begin) {
        pieces.push_back({begin, at});
        begin = at;
      }
      after_mark = at + kMetaspace.size();
    }
    pieces.push_back({begin, range.end});
  }
  pre.pieces = std::move(pieces);
}

AddedTokenMatcher make_matcher(const TokenizerSpec& spec, const Normalizer& normalizer, bool normalized) {
  std::vector<std::pair<std::string, AddedToken>> patterns;
  for (const AddedToken& token : spec.added_tokens) {
    if (token.normalized != normalized) continue;
    std::string pattern = token.content;
    if (normalized && !spec.added_tokens_are_normal) {
      TextWork work(pattern.size());
      normalizer.apply(pattern, work);
    }
    patterns.emplace_back(std::move(pattern), token);
  }
  return AddedTokenMatcher(std::move(patterns), spec.source);
}

}  // namespace

struct Tokenizer::Impl {
  struct Token {
    std::string text;
    std::string bytes;
    bool present = false;
    bool special = false;
    bool is_text = false;  // stands for its text, whatever the decoder says
    bool has_normal_form = false;
  };

  Impl(const TokenizerSpec& spec, const std::atomic<bool>* cancel)
      : source(spec.source),
        normalizer(spec.normalizers, spec.source),
        pre_tokenizer(spec.pre_tokenizers, spec.source),
        model(make_token_model(spec, pre_tokenizer.byte_level())),
        raw_added(make_matcher(spec, normalizer, false)),
        normalized_added(make_matcher(spec, normalizer, true)),
        decoder(spec),
        prefix_ids(spec.prefix_ids),
        suffix_ids(spec.suffix_ids),
        bos(spec.bos),
        eos(spec.eos),
        unk(spec.unk),
        pad(spec.pad),
        end_tokens(spec.end_tokens),
        notes(spec.notes),
        chat_templates(spec.chat_templates) {
    tokens.reserve(spec.vocab.size() + spec.added_tokens.size());
    ids.reserve(spec.vocab.size() + spec.added_tokens.size());
    for (const VocabEntry& entry : spec.vocab) add_token(entry.text, entry.id, "vocabulary");
    for (const AddedToken& added : spec.added_tokens) {
      const auto known = ids.find(added.content);
      if (known == ids.end()) {
        add_token(added.content, added.id, "added_tokens");
      } else if (known->second != added.id) {
        throw DataCorrupted("{}: added token {} has id {}; the vocabulary gives it {}", source, quote(added.content),
                            added.id, known->second);
      }
      Token& token = tokens[static_cast<size_t>(added.id)];
      token.special |= added.special;
      token.is_text = spec.added_tokens_are_text;
      if (!added.normalized || token.is_text || spec.added_tokens_are_normal) continue;
      TextWork work(added.content.size(), cancel);
      std::string form = normalize(added.content, work);
      token.has_normal_form = form != added.content;
      if (token.has_normal_form) normal_forms.insert_or_assign(added.content, std::move(form));
    }
    for (const AddedToken& added : spec.added_tokens) added_ids.push_back(added.id);
    std::sort(added_ids.begin(), added_ids.end());
    if (tokens.empty()) throw DataCorrupted("{}: the vocabulary is empty", source);
    decode_vocabulary(cancel);
    for (const auto& list : {prefix_ids, suffix_ids}) {
      for (const int32_t id : list) check_id(id, "post_processor");
    }
    for (const auto& id : {bos, eos, unk, pad}) {
      if (id) check_id(*id, "bos / eos / unk / pad");
    }
    for (const EndToken& end : end_tokens) check_id(end.id, end.key);
  }

  // Decodes every token to bytes. A decoder step that expands its input must not fill the memory.
  void decode_vocabulary(const std::atomic<bool>* cancel) {
    size_t text_bytes = 0, decoded_bytes = 0;
    for (const Token& token : tokens) text_bytes += token.text.size();
    const TextWork whole(text_bytes, cancel);
    for (Token& token : tokens) {
      if (!token.present) continue;
      TextWork work(token.text.size(), cancel);
      work.check();
      append_bytes(token.bytes, token, false, work);
      decoded_bytes += token.bytes.size();
      check_growth(decoded_bytes, whole, source + ": decoder: the vocabulary");
    }
  }

  void append_bytes(std::string& bytes, const Token& token, bool first, TextWork& work) const {
    if (token.is_text) {
      bytes += token.text;
    } else {
      decoder.append_token(bytes, token.has_normal_form ? normal_forms.find(token.text)->second : token.text, first,
                           work);
    }
  }

  void add_token(const std::string& text, int32_t id, std::string_view place) {
    if (id < 0 || id >= kMaxVocab) {
      throw DataCorrupted("{}: {}: token {} has id {}, outside 0 .. {}", source, place, quote(text), id, kMaxVocab - 1);
    }
    if (static_cast<size_t>(id) >= tokens.size()) tokens.resize(static_cast<size_t>(id) + 1);
    Token& token = tokens[static_cast<size_t>(id)];
    if (token.present) {
      throw DataCorrupted("{}: {}: tokens {} and {} both have id {}", source, place, quote(token.text), quote(text),
                          id);
    }
    if (!ids.emplace(text, id).second) {
      throw DataCorrupted("{}: {}: token {} is listed twice", source, place, quote(text));
    }
    token.text = text;
    token.present = true;
  }

  bool is_token(int64_t id) const {
    return id >= 0 && static_cast<size_t>(id) < tokens.size() && tokens[static_cast<size_t>(id)].present;
  }
  void check_id(int32_t id, std::string_view place) const {
    if (!is_token(id)) throw DataCorrupted("{}: {} names id {}, which is not a token", source, place, id);
  }
  const Token& token(int32_t id) const {
    if (!is_token(id)) {
      throw InvalidArgument("{}: id {} is not a token; the vocabulary ends at {}", source, id, tokens.size());
    }
    return tokens[static_cast<size_t>(id)];
  }

  // A stretch of text without added tokens, already normalized.
  void encode_section(std::string text, bool at_start, TokenModel::Scratch& scratch, std::vector<int32_t>& out,
                      TextWork& work) const {
    PreTokenized pre;
    pre.text = std::move(text);
    pre.at_start = at_start;
    pre_tokenizer.apply(pre, work);
    if (model->splits_at_metaspace()) split_at_metaspace(pre, work);
    std::optional<PieceCache> cache;
    if (pre.text.size() >= PieceCache::kMinText) cache.emplace();
    for (size_t i = 0; i < pre.pieces.size(); ++i) {
      work.tick();
      const std::string_view piece = pre.piece(i);
      if (!cache || piece.size() > PieceCache::kMaxPiece) {
        model->encode(piece, scratch, out, work);
        continue;
      }
      PieceCache::Entry& entry = cache->slot(piece);
      if (entry.piece == piece) {
        for (size_t k = 0; k < entry.count; ++k) out.push_back(out[entry.begin + k]);
      } else {
        const size_t begin = out.size();
        model->encode(piece, scratch, out, work);
        entry = {piece, begin, out.size() - begin};
      }
    }
  }

  // With `runs`, special and control tokens are read in trusted ones only.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options,
                              std::span<const TrustRun> runs) const {
    if (text.size() >= size_t{1} << 31) {
      throw InvalidArgument("text of {} bytes; at most {} can be encoded at once", text.size(), (size_t{1} << 31) - 1);
    }
    TextWork work(text.size(), options.cancel);
    for (size_t pos = 0; pos < text.size();) {
      work.tick();
      const Utf8Step step = next_utf8(text, pos);
      if (step.status != Utf8Status::kValid) {
        throw InvalidArgument("text is not UTF-8: byte 0x{:02X} at offset {} of {}",
                              static_cast<unsigned>(static_cast<uint8_t>(text[pos])), pos, text.size());
      }
      pos += static_cast<size_t>(step.length);
    }
    std::vector<int32_t> out;
    if (options.add_special_tokens) out = prefix_ids;
    TokenModel::Scratch scratch;
    for (const auto& raw : raw_added.split(text, options.parse_special, work, runs, options.control)) {
      if (raw.id >= 0) {
        out.push_back(raw.id);
        continue;
      }
      const std::vector<TrustRun> inside = clip(runs, raw.begin, raw.end);
      for (const Part& part : normalized_parts(text.substr(raw.begin, raw.end - raw.begin), options, inside, work)) {
        encode_normalized(part, options.control, raw.begin == 0 && part.first, scratch, out, work);
      }
    }
    if (options.add_special_tokens) out.insert(out.end(), suffix_ids.begin(), suffix_ids.end());
    return out;
  }

  static std::vector<TrustRun> clip(std::span<const TrustRun> runs, size_t begin, size_t end) {
    std::vector<TrustRun> clipped;
    auto run = std::upper_bound(runs.begin(), runs.end(), begin,
                                [](size_t value, const TrustRun& other) { return value < other.end; });
    for (size_t done = begin; done < end; ++run) {
      done = std::min(run == runs.end() ? end : run->end, end);
      if (run == runs.end()) break;
      clipped.push_back({done - begin, run->trusted});
    }
    return clipped;
  }

  // Text between added tokens that are searched before normalization, normalized.
  struct Part {
    std::string text;
    bool parse_special;
    bool first;  // begins where the text around it does
  };

  Part normalized_part(std::string_view text, bool parse_special, bool first, TextWork& work) const {
    Part part{std::string(text), parse_special, first};
    part.first &= normalizer.apply(part.text, work);
    return part;
  }

  std::string normalize(std::string_view text, TextWork& work) const {
    return normalized_part(text, false, false, work).text;
  }

  // Normalization moves the borders of runs, so that special tokens which are searched after it cannot be told by
  // their place. But they can be told from a text in which nothing but white space is left of what is not trusted: the
  // ones that it has at the same places are made of trusted text and the space that old files of Llama 2 want before
  // them. If the whole text has others, somebody planted one, and each run is a part.
  std::vector<Part> normalized_parts(std::string_view text, const EncodeOptions& options,
                                     std::span<const TrustRun> runs, TextWork& work) const {
    std::vector<Part> whole{normalized_part(text, options.parse_special, true, work)};
    const bool trusted = std::all_of(runs.begin(), runs.end(), [](const TrustRun& run) { return run.trusted; });
    if (trusted || !options.parse_special || !normalized_added.has_special(options.control)) return whole;
    std::vector<Part> parts;
    std::string blank(text);
    bool planted = false;
    size_t begin = 0;
    for (const TrustRun& run : runs) {
      parts.push_back(normalized_part(text.substr(begin, run.end - begin), run.trusted, begin == 0, work));
      if (!run.trusted) {
        planted = planted || !specials(parts.back().text, options, work).empty();
        for (size_t pos = begin; pos < run.end; ++pos) {
          if (std::string_view(" \t\n\r").find(blank[pos]) == std::string_view::npos) blank[pos] = '\x01';
        }
      }
      begin = run.end;
    }
    planted = planted || specials(whole[0].text, options, work) != specials(normalize(blank, work), options, work);
    return planted ? parts : whole;
  }

  // The special tokens of a normalized text.
  std::vector<AddedTokenMatcher::Section> specials(std::string_view text, const EncodeOptions& options,
                                                   TextWork& work) const {
    std::vector<AddedTokenMatcher::Section> sections = normalized_added.split(text, true, work);
    std::erase_if(sections,
                  [&](const auto& section) { return section.id < 0 || !is_special(section.id, options.control); });
    return sections;
  }

  bool is_special(int32_t id, std::span<const int32_t> control) const {
    return token(id).special || std::binary_search(control.begin(), control.end(), id);
  }

  void encode_normalized(const Part& part, std::span<const int32_t> control, bool at_start,
                         TokenModel::Scratch& scratch, std::vector<int32_t>& out, TextWork& work) const {
    const std::string& text = part.text;
    if (normalized_added.empty()) {
      encode_section(text, at_start, scratch, out, work);
      return;
    }
    for (const auto& section : normalized_added.split(text, part.parse_special, work, {}, control)) {
      if (section.id >= 0) {
        out.push_back(section.id);
      } else {
        encode_section(text.substr(section.begin, section.end - section.begin), at_start && section.begin == 0, scratch,
                       out, work);
      }
    }
  }

  std::string source;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::unique_ptr<const TokenModel> model;
  AddedTokenMatcher raw_added, normalized_added;
  TokenDecoder decoder;
  std::vector<int32_t> prefix_ids, suffix_ids, added_ids;
  std::optional<int32_t> bos, eos, unk, pad;
  std::vector<EndToken> end_tokens;
  std::vector<std::string> notes;
  std::vector<NamedTemplate> chat_templates;
  std::vector<Token> tokens;  // by id
  StringMap<int32_t> ids;
  // The normal forms of added tokens that are searched in normalized text, by the text of the token. Decoders write
  // these forms, as the Hugging Face library does.
  StringMap<std::string> normal_forms;
};

Tokenizer::Tokenizer(const TokenizerSpec& spec, const std::atomic<bool>* cancel)
    : impl_(std::make_unique<const Impl>(spec, cancel)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  return impl_->encode(text, options, {});
}

std::vector<int32_t> Tokenizer::encode(std::span<const TextSegment> segments, const EncodeOptions& options) const {
  std::string text;
  std::vector<TrustRun> runs;
  for (const TextSegment& segment : segments) {
    if (segment.text.empty()) continue;
    text += segment.text;
    if (!runs.empty() && runs.back().trusted == segment.trusted) {
      runs.back().end = text.size();
    } else {
      runs.push_back({text.size(), segment.trusted});
    }
  }
  return impl_->encode(text, options, runs);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  IncrementalDecoder decoder(*this, skip_special);
  std::string text;
  for (const int32_t id : ids) text += decoder.next(id);
  text += decoder.finish();
  return text;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->tokens.size()); }
bool Tokenizer::is_token(int64_t id) const { return impl_->is_token(id); }
std::string_view Tokenizer::token_text(int32_t id) const { return impl_->token(id).text; }
std::string_view Tokenizer::token_bytes(int32_t id) const { return impl_->token(id).bytes; }
bool Tokenizer::is_special(int32_t id) const { return impl_->is_token(id) && impl_->token(id).special; }

std::optional<int32_t> Tokenizer::token_to_id(std::string_view text) const {
  const auto found = impl_->ids.find(text);
  if (found == impl_->ids.end()) return std::nullopt;
  return found->second;
}

std::span<const int32_t> Tokenizer::added_ids() const { return impl_->added_ids; }
std::optional<int32_t> Tokenizer::bos() const { return impl_->bos; }
std::optional<int32_t> Tokenizer::eos() const { return impl_->eos; }
std::optional<int32_t> Tokenizer::unk() const { return impl_->unk; }
std::optional<int32_t> Tokenizer::pad() const { return impl_->pad; }
std::span<const int32_t> Tokenizer::prefix_ids() const { return impl_->prefix_ids; }
std::span<const int32_t> Tokenizer::suffix_ids() const { return impl_->suffix_ids; }
std::span<const EndToken> Tokenizer::end_tokens() const { return impl_->end_tokens; }
std::span<const NamedTemplate> Tokenizer::chat_templates() const { return impl_->chat_templates; }
const std::string& Tokenizer::chat_template() const {
  static const std::string none;
  for (const NamedTemplate& named : impl_->chat_templates) {
    if (named.name == "default") return named.source;
  }
  return none;
}
std::span<const std::string> Tokenizer::notes() const { return impl_->notes; }
const std::string& Tokenizer::source() const { return impl_->source; }

IncrementalDecoder::IncrementalDecoder(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(&tokenizer), skip_special_(skip_special), strip_left_(tokenizer.impl_->decoder.strip_count()) {}

std::string IncrementalDecoder::next(int32_t id) {
  const Tokenizer::Impl& impl = *tokenizer_->impl_;
  const Tokenizer::Impl::Token& token = impl.token(id);
  if (skip_special_ && token.special) return {};
  if (first_) {
    TextWork work(token.text.size());
    impl.append_bytes(pending_, token, true, work);
    first_ = false;
  } else {
    pending_ += token.bytes;
  }
  size_t begin = 0;
  while (strip_left_ > 0 && begin < pending_.size()) {
    if (pending_[begin] != impl.decoder.strip_char()) {
      strip_left_ = 0;
    } else {
      ++begin, --strip_left_;
    }
  }
  pending_.erase(0, begin);
  // Takes everything except a UTF-8 sequence that the end of `pending_` cuts off, which has at most three bytes.
  size_t end = pending_.size();
  for (size_t back = 1; back <= std::min<size_t>(3, pending_.size()); ++back) {
    const size_t pos = pending_.size() - back;
    if ((static_cast<unsigned char>(pending_[pos]) & 0xC0) == 0x80) continue;
    if (next_utf8(pending_, pos).status == Utf8Status::kTruncated) end = pos;
    break;
  }
  std::string text;
  append_lossy_utf8(text, std::string_view(pending_).substr(0, end));
  pending_.erase(0, end);
  return text;
}

std::string IncrementalDecoder::finish() {
  std::string text;
  append_lossy_utf8(text, pending_);
  pending_.clear();
  first_ = true;
  strip_left_ = tokenizer_->impl_->decoder.strip_count();
  return text;
}

}  // namespace eadem::io
