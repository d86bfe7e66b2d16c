// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/pre_tokenizer.h"

#include <functional>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/normalizer.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

using Range = PreTokenized::Range;

// A stretch of a piece that a pattern matched, or one between matches.
struct Stretch {
  size_t begin, end;
  bool match;
};

// Matches of a one-character predicate, each on its own.
template <typename Predicate>
void stretches_of_chars(std::string_view text, const Predicate& predicate, std::vector<Stretch>& out, TextWork& work) {
  size_t rest = 0;
  for (size_t pos = 0; pos < text.size();) {
    work.tick();
    const Utf8Step step = decode_valid_utf8(text.data() + pos);
    const size_t end = pos + static_cast<size_t>(step.length);
    if (predicate(step.value)) {
      if (rest != pos) out.push_back({rest, pos, false});
      out.push_back({pos, end, true});
      rest = end;
    }
    pos = end;
  }
  if (rest != text.size()) out.push_back({rest, text.size(), false});
}

void stretches_of_literal(std::string_view text, std::string_view literal, std::vector<Stretch>& out, TextWork& work) {
  size_t rest = 0;
  for (size_t at; (at = text.find(literal, rest)) != std::string_view::npos; rest = at + literal.size()) {
    work.tick();
    if (rest != at) out.push_back({rest, at, false});
    out.push_back({at, at + literal.size(), true});
  }
  if (rest != text.size()) out.push_back({rest, text.size(), false});
}

// A match may be empty: an empty stretch, where pieces are cut.
void stretches_of_regex(std::string_view text, size_t offset, Regex::Scanner& scanner, std::vector<Stretch>& out) {
  scanner.scan(text, offset);
  size_t rest = 0;
  for (size_t begin = 0, end = 0; scanner.next(begin, end); rest = end) {
    if (rest != begin) out.push_back({rest, begin, false});
    out.push_back({begin, end, true});
  }
  if (rest != text.size()) out.push_back({rest, text.size(), false});
}

// [\p{Alphabetic}\p{M}\p{Nd}\p{Pc}]+ and runs of everything else that is not white space.
void stretches_of_words(std::string_view text, std::vector<Stretch>& out, TextWork& work) {
  const auto kind_at = [text](size_t pos, size_t& end) {
    const Utf8Step step = decode_valid_utf8(text.data() + pos);
    end = pos + static_cast<size_t>(step.length);
    return char_class(step.value) == CharClass::kSpace ? 0 : is_word(step.value) ? 1 : 2;
  };
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = pos;
    const int kind = kind_at(begin, pos);
    for (size_t end = pos; pos < text.size() && kind_at(pos, end) == kind; pos = end) work.tick();
    out.push_back({begin, pos, kind == 0});
  }
}

void append_pieces(const std::vector<Stretch>& stretches, SplitBehavior behavior, size_t offset,
                   std::vector<Range>& out) {
  const size_t first = out.size();
  bool previous = false;
  switch (behavior) {
    case SplitBehavior::kRemoved:
      for (const Stretch& s : stretches) {
        if (!s.match) out.push_back({offset + s.begin, offset + s.end});
      }
      return;
    case SplitBehavior::kIsolated:
      for (const Stretch& s : stretches) out.push_back({offset + s.begin, offset + s.end});
      return;
    case SplitBehavior::kMergedWithPrevious:
      for (const Stretch& s : stretches) {
        if (s.match && !previous && out.size() > first) {
          out.back().end = offset + s.end;
        } else {
          out.push_back({offset + s.begin, offset + s.end});
        }
        previous = s.match;
      }
      return;
    case SplitBehavior::kMergedWithNext:
      // A match joins the stretch after it unless that one is itself a match.
      for (size_t i = 0; i < stretches.size(); ++i) {
        const Stretch& s = stretches[i];
        if (s.match && i + 1 < stretches.size() && !stretches[i + 1].match) {
          out.push_back({offset + s.begin, offset + stretches[i + 1].end});
          ++i;
        } else {
          out.push_back({offset + s.begin, offset + s.end});
        }
      }
      return;
    case SplitBehavior::kContiguous:
      for (const Stretch& s : stretches) {
        if (out.size() > first && s.match == previous) {
          out.back().end = offset + s.end;
        } else {
          out.push_back({offset + s.begin, offset + s.end});
        }
        previous = s.match;
      }
      return;
  }
}

// Rebuilds the text piece by piece; `edit` appends a piece's new form. `place` names the step.
template <typename Edit>
void rewrite_pieces(PreTokenized& pre, TextWork& work, std::string_view place, const Edit& edit) {
  std::string text;
  text.reserve(pre.text.size() + pre.pieces.size());
  std::vector<Range> pieces;
  pieces.reserve(pre.pieces.size());
  for (size_t i = 0; i < pre.pieces.size(); ++i) {
    const size_t begin = text.size();
    edit(pre.piece(i), i == 0 && pre.at_start, text);
    pieces.push_back({begin, text.size()});
    check_growth(text.size(), work, place);
    work.tick();
  }
  pre.text = std::move(text);
  pre.pieces = std::move(pieces);
}

}  // namespace

struct PreTokenizer::Step {
  PreTokenizerStep spec;
  std::optional<KnownPattern> known;
  std::unique_ptr<Regex> regex;

  void collect(std::string_view text, size_t offset, Regex::Scanner* scanner, std::vector<Stretch>& out,
               TextWork& work) const {
    using Kind = PreTokenizerStep::Kind;
    switch (spec.kind) {
      case Kind::kSplit:
        if (scanner == nullptr) {
          stretches_of_literal(text, spec.pattern.text, out, work);
        } else {
          stretches_of_regex(text, offset, *scanner, out);
        }
        break;
      case Kind::kDigits:
        stretches_of_chars(
            text, [](char32_t c) { return char_class(c) == CharClass::kNumber; }, out, work);
        break;
      case Kind::kWhitespaceSplit:
        stretches_of_chars(
            text, [](char32_t c) { return char_class(c) == CharClass::kSpace; }, out, work);
        break;
      case Kind::kPunctuation: stretches_of_chars(text, is_punctuation, out, work); break;
      case Kind::kWhitespace: stretches_of_words(text, out, work); break;
      case Kind::kMetaspace: stretches_of_literal(text, spec.replacement, out, work); break;
      case Kind::kByteLevel: EADEM_UNREACHABLE("ByteLevel splits by its known pattern");
    }
    if (spec.invert) {
      for (Stretch& s : out) s.match = !s.match;
    }
  }

  SplitBehavior behavior() const {
    using Kind = PreTokenizerStep::Kind;
    switch (spec.kind) {
      case Kind::kSplit:
      case Kind::kPunctuation: return spec.behavior;
      case Kind::kDigits: return spec.individual_digits ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
      case Kind::kWhitespace:
      case Kind::kWhitespaceSplit: return SplitBehavior::kRemoved;
      case Kind::kMetaspace: return SplitBehavior::kMergedWithNext;
      case Kind::kByteLevel: return SplitBehavior::kIsolated;
    }
    EADEM_UNREACHABLE("pre-tokenizer kind {}", static_cast<int>(spec.kind));
  }

  void split(PreTokenized& pre, TextWork& work) const {
    std::vector<Range> pieces;
    std::vector<Stretch> stretches;
    std::optional<Regex::Scanner> scanner;
    if (regex) scanner.emplace(*regex, work);
    for (size_t i = 0; i < pre.pieces.size(); ++i) {
      const Range range = pre.pieces[i];
      const std::string_view text = pre.piece(i);
      work.tick();
      if (known) {
        for (size_t pos = 0; pos < text.size();) {
          const size_t end = match_pattern(*known, text, pos);
          pieces.push_back({range.begin + pos, range.begin + end});
          pos = end;
          work.tick();
        }
      } else {
        stretches.clear();
        collect(text, range.begin, scanner ? &*scanner : nullptr, stretches, work);
        append_pieces(stretches, behavior(), range.begin, pieces);
      }
    }
    std::erase_if(pieces, [](const Range& range) { return range.begin == range.end; });
    pre.at_start = pre.at_start && !pieces.empty() && pieces[0].begin == 0;
    pre.pieces = std::move(pieces);
  }
};

PreTokenizer::PreTokenizer(const std::vector<PreTokenizerStep>& steps, const std::string& source) {
  using Kind = PreTokenizerStep::Kind;
  for (const PreTokenizerStep& spec : steps) {
    if (byte_level_ && (spec.kind == Kind::kByteLevel || spec.kind == Kind::kMetaspace)) {
      throw Unsupported("{}: pre_tokenizer: {} after ByteLevel is not supported", source,
                        spec.kind == Kind::kByteLevel ? "ByteLevel" : "Metaspace");
    }
    Step step{spec, std::nullopt, nullptr};
    if (spec.kind == Kind::kByteLevel) {
      byte_level_ = true;
      if (spec.use_regex) step.known = KnownPattern::kGpt2;
    } else if (spec.kind == Kind::kSplit) {
      if (spec.pattern.text.empty()) throw DataCorrupted("{}: pre_tokenizer: the pattern of 'Split' is empty", source);
      if (spec.pattern.kind == Pattern::Kind::kRegex) {
        // The known patterns match everything, so only Isolated without inversion is the plain tiling.
        const bool tiles = spec.behavior == SplitBehavior::kIsolated && !spec.invert;
        const bool same = tiles || (spec.behavior == SplitBehavior::kRemoved && spec.invert);
        if (same) step.known = known_pattern(spec.pattern.text);
        if (!step.known) step.regex = std::make_unique<Regex>(spec.pattern.text, source + ": pre_tokenizer");
      }
    } else if (spec.kind == Kind::kMetaspace && spec.replacement.empty()) {
      throw DataCorrupted("{}: pre_tokenizer: the replacement of 'Metaspace' is empty", source);
    }
    steps_.push_back(std::move(step));
  }
}

PreTokenizer::~PreTokenizer() = default;

void PreTokenizer::apply(PreTokenized& pre, TextWork& work) const {
  using Kind = PreTokenizerStep::Kind;
  pre.pieces.clear();
  if (!pre.text.empty()) pre.pieces.push_back({0, pre.text.size()});
  bool in_alphabet = false;
  for (const Step& step : steps_) {
    if (step.spec.kind == Kind::kMetaspace) {
      rewrite_pieces(pre, work, "pre_tokenizer: 'Metaspace'",
                     [&](std::string_view piece, bool first, std::string& out) {
                       const std::string& mark = step.spec.replacement;
                       const bool marked = piece.substr(0, 1) == " " || piece.substr(0, mark.size()) == mark;
                       const bool wanted = step.spec.prepend_scheme == PrependScheme::kAlways ||
                                           (step.spec.prepend_scheme == PrependScheme::kFirst && first);
                       if (wanted && !marked) out += mark;
                       for (const char c : piece) {
                         if (c != ' ') {
                           out += c;
                           continue;
                         }
                         out += mark;
                         check_growth(out.size(), work, "pre_tokenizer: 'Metaspace'");
                         work.tick();
                       }
                     });
    } else if (step.spec.kind == Kind::kByteLevel && step.spec.add_prefix_space) {
      rewrite_pieces(pre, work, "pre_tokenizer: 'ByteLevel'", [](std::string_view piece, bool, std::string& out) {
        if (piece.substr(0, 1) != " ") out += ' ';
        out += piece;
      });
    }
    const bool splits = step.spec.kind == Kind::kByteLevel   ? step.spec.use_regex
                        : step.spec.kind == Kind::kMetaspace ? step.spec.split
                                                             : true;
    if (splits) step.split(pre, work);
    if (step.spec.kind == Kind::kByteLevel && &step != &steps_.back()) {
      rewrite_pieces(pre, work, "pre_tokenizer: 'ByteLevel'", [](std::string_view piece, bool, std::string& out) {
        for (const char byte : piece) append_utf8(out, char_from_byte(static_cast<uint8_t>(byte)));
      });
      in_alphabet = true;
    }
  }
  if (!in_alphabet) return;
  // Steps after ByteLevel cut and drop, but insert nothing: every character still stands for a byte.
  rewrite_pieces(pre, work, "pre_tokenizer: 'ByteLevel'", [](std::string_view piece, bool, std::string& out) {
    for (size_t pos = 0; pos < piece.size();) {
      const Utf8Step c = decode_valid_utf8(piece.data() + pos);
      out.push_back(static_cast<char>(byte_from_char(c.value)));
      pos += static_cast<size_t>(c.length);
    }
  });
}

}  // namespace eadem::io
