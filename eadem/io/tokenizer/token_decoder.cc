// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/token_decoder.h"

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// The byte of "<0xNN>", or -1.
int byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = hex_digit(token[3]), low = hex_digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

void strip_chars(std::string& text, std::string_view c, int64_t start, int64_t stop) {
  size_t begin = 0, end = text.size();
  for (int64_t i = 0; i < start && end - begin >= c.size() && text.compare(begin, c.size(), c) == 0; ++i) {
    begin += c.size();
  }
  for (int64_t i = 0; i < stop && end - begin >= c.size() && text.compare(end - c.size(), c.size(), c) == 0; ++i) {
    end -= c.size();
  }
  text = text.substr(begin, end - begin);
}

void replace_metaspace(std::string& text, const std::string& mark, bool drop) {
  std::string out;
  size_t copied = 0;
  for (size_t at; (at = text.find(mark, copied)) != std::string::npos; copied = at + mark.size()) {
    out.append(text, copied, at - copied);
    if (!drop) out += ' ';
  }
  out.append(text, copied);
  text = std::move(out);
}

// What continues a word loses its prefix, other tokens come after a space; then the spaces of written English go.
void join_word(std::string& text, const DecoderStep& step, bool first) {
  if (!first && text.starts_with(step.content))
    text.erase(0, step.content.size());
  else if (!first)
    text.insert(0, " ");
  if (!step.cleanup) return;
  constexpr std::pair<std::string_view, std::string_view> kReplaced[] = {
      {" .", "."},   {" ?", "?"},           {" !", "!"},   {" ,", ","},     {" ' ", "'"},   {" n't", "n't"},
      {" 'm", "'m"}, {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kReplaced)
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
      text.replace(at, from.size(), to);
}

}  // namespace

struct TokenDecoder::Step {
  DecoderStep spec;
  std::unique_ptr<Replacer> replacer;
};

TokenDecoder::TokenDecoder(const TokenizerSpec& spec) : join_with_space_(spec.join_with_space) {
  using Kind = DecoderStep::Kind;
  bool fused = false, bytes = false;
  const auto refuse = [&](std::string_view what) { throw Unsupported("{}: decoder: {}", spec.source, what); };
  for (const DecoderStep& decoder : spec.decoders) {
    Step step{decoder, nullptr};
    switch (decoder.kind) {
      case Kind::kFuse: fused = true; continue;
      case Kind::kStrip:
        if (!fused) break;
        if (decoder.stop != 0) refuse(fmt::format("Strip with stop {} after Fuse", decoder.stop));
        if (decoder.content.size() != 1) refuse(fmt::format("Strip of '{}' after Fuse", decoder.content));
        if (strip_count_ != 0) refuse("two Strip steps after Fuse");
        strip_count_ = decoder.start;
        strip_char_ = decoder.content[0];
        continue;
      case Kind::kReplace:
        step.replacer = std::make_unique<Replacer>(decoder.pattern, decoder.content, spec.source + ": decoder");
        break;
      case Kind::kByteLevel:
      case Kind::kByteFallback:
      case Kind::kMetaspace:
      case Kind::kWordPiece: break;
    }
    if (fused) refuse("only Strip may follow Fuse");
    if (bytes) refuse("only Fuse may follow ByteFallback or ByteLevel");
    bytes = decoder.kind == Kind::kByteFallback || decoder.kind == Kind::kByteLevel;
    steps_.push_back(std::move(step));
  }
}

TokenDecoder::~TokenDecoder() = default;

void TokenDecoder::append_token(std::string& bytes, std::string_view token, bool first, TextWork& work) const {
  using Kind = DecoderStep::Kind;
  if (join_with_space_ && !first) bytes += ' ';
  std::string text(token);
  std::string converted;
  for (const Step& step : steps_) {
    switch (step.spec.kind) {
      case Kind::kByteLevel:
        // A token with a character outside the byte alphabet stands for itself.
        if (bytes_from_alphabet(converted, text)) text = converted;
        break;
      case Kind::kReplace: step.replacer->apply(text, work); break;
      case Kind::kByteFallback:
        if (const int byte = byte_of_token(text); byte >= 0) text.assign(1, static_cast<char>(byte));
        break;
      case Kind::kStrip: strip_chars(text, step.spec.content, step.spec.start, step.spec.stop); break;
      case Kind::kMetaspace:
        replace_metaspace(text, step.spec.replacement, first && step.spec.prepend_scheme != PrependScheme::kNever);
        break;
      case Kind::kWordPiece: join_word(text, step.spec, first); break;
      case Kind::kFuse: EADEM_UNREACHABLE("Fuse is not a step of a single token");
    }
  }
  bytes += text;
}

}  // namespace eadem::io
