// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/sentencepiece_normalizer.h"

#include "eadem/io/tokenizer/normalizer.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {

SentencePieceNormalizer::SentencePieceNormalizer(const NormalizerStep& step, const std::string& source)
    : add_dummy_prefix_(step.add_dummy_prefix), remove_extra_whitespaces_(step.remove_extra_whitespaces) {
  if (!step.content.empty()) map_.emplace(step.content, source);
  std::vector<PrefixIndex::Entry> symbols;
  for (const std::string& symbol : step.user_defined_symbols) symbols.push_back({symbol, 0, 0});
  symbols_ = PrefixIndex(std::move(symbols), source);
}

PrecompiledMap::Match SentencePieceNormalizer::prefix_of(std::string_view text) const {
  size_t length = 0;
  symbols_.each(text, [&](const PrefixIndex::Entry& symbol) { length = symbol.text.size(); });
  if (length == 0 && map_) {
    if (const auto rule = map_->longest(text)) return *rule;
  }
  if (length == 0) length = static_cast<size_t>(decode_valid_utf8(text.data()).length);
  return {length, text.substr(0, length)};
}

void SentencePieceNormalizer::apply(std::string& text, TextWork& work) const {
  std::string_view rest = text;
  while (remove_extra_whitespaces_ && !rest.empty()) {
    const PrecompiledMap::Match prefix = prefix_of(rest);
    if (prefix.replacement != " ") break;
    rest.remove_prefix(prefix.length);
    work.tick();
  }
  std::string out;
  if (add_dummy_prefix_ && !rest.empty()) out += kMetaspace;
  bool after_space = remove_extra_whitespaces_;
  while (!rest.empty()) {
    PrecompiledMap::Match prefix = prefix_of(rest);
    rest.remove_prefix(prefix.length);
    while (after_space && prefix.replacement.starts_with(' ')) prefix.replacement.remove_prefix(1);
    for (const char c : prefix.replacement) c == ' ' ? out += kMetaspace : out += c;
    if (!prefix.replacement.empty()) after_space = remove_extra_whitespaces_ && prefix.replacement.ends_with(' ');
    check_growth(out.size(), work, "normalizer of SentencePiece");
    work.tick();
  }
  // Also those that the text itself spelt so.
  while (remove_extra_whitespaces_ && out.ends_with(kMetaspace)) out.resize(out.size() - kMetaspace.size());
  text = std::move(out);
}

}  // namespace eadem::io
