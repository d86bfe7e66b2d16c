// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

// Oniguruma (Ruby syntax, UTF-8) to PCRE2. Differences that matter:
//   \s \S   Oniguruma: White_Space. PCRE2 with UCP adds U+180E.       -> \p{White_Space}
//   \w      Oniguruma: Alphabetic | M | Nd | Pc, and outside of a class also the other numbers below U+0100, which an
//           older table of its own has. PCRE2: L | N | _.            -> the union, as a class
//   \W \b \B  of that \w                                              -> a negated class, lookarounds
//   \p{Han}  Oniguruma: Script. PCRE2: Script_Extensions, with U+3001. -> \p{sc:Han}
//   (?i:ss)  Oniguruma: also one letter that folds to the two, here U+00DF. -> refused, with all that is not ASCII
//   \h \K \G, POSIX classes, nested classes, &&, {n,m}+, (?m          -> refused
// Anchors ^ and $ are line anchors in Ruby: PCRE2_MULTILINE.
constexpr std::string_view kWordInClass = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
constexpr std::string_view kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}";

// The name between the braces of \p{...}; that of a script asks for the property Script. PCRE2 itself knows which names
// are scripts.
std::string property_name(std::string_view name) {
  const std::string_view negation = name.starts_with('^') ? "^" : "";
  const std::string script = fmt::format("{}sc:{}", negation, name.substr(negation.size()));
  const std::string pattern = fmt::format("\\p{{{}}}", script);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF, &error, &offset, nullptr);
  pcre2_code_free(code);
  return code != nullptr ? script : std::string(name);
}

// Whether a character of a case-insensitive group may stand for several in Oniguruma, alone or with the one before it.
bool may_fold_to_several(char before, char c) {
  if (static_cast<unsigned char>(c) >= 0x80) return true;
  const char pair[] = {static_cast<char>(before | 0x20), static_cast<char>(c | 0x20)};
  constexpr std::string_view kPairs[] = {"ss", "st", "ff", "fi", "fl"};
  return std::find(std::begin(kPairs), std::end(kPairs), std::string_view(pair, 2)) != std::end(kPairs);
}

std::string to_pcre2(const std::string& pattern, const std::string& place) {
  const auto refuse = [&](std::string_view what) {
    throw Unsupported("{}: pattern {} uses {}, whose Oniguruma meaning is not reproduced here", place, quote(pattern),
                      what);
  };
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  std::vector<bool> groups{false};  // the open ones: whether case is ignored in them
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      if (i + 1 == pattern.size()) throw DataCorrupted("{}: pattern {} ends in a backslash", place, quote(pattern));
      const char e = pattern[++i];
      switch (e) {
        case 's': out += "\\p{White_Space}"; break;
        case 'S': out += "\\P{White_Space}"; break;
        case 'w': out += in_class ? std::string(kWordInClass) : fmt::format("[{}]", kWord); break;
        case 'W':
          if (in_class) refuse("\\W in a class");
          out += fmt::format("[^{}]", kWord);
          break;
        case 'b':
          if (in_class) refuse("\\b in a class");
          out += fmt::format("(?:(?<=[{0}])(?![{0}])|(?<![{0}])(?=[{0}]))", kWord);
          break;
        case 'B':
          if (in_class) refuse("\\B in a class");
          out += fmt::format("(?:(?<=[{0}])(?=[{0}])|(?<![{0}])(?![{0}]))", kWord);
          break;
        case 'v': out += "\\x{0B}"; break;  // vertical tab in Oniguruma, any vertical space in PCRE2
        case 'd':
        case 'D':
        case 'n':
        case 'r':
        case 't':
        case 'f': out += c, out += e; break;
        case 'p':
        case 'P':
        case 'x': {
          // The escape includes its braces, so that a '}' below closes a repeat.
          const size_t close = pattern.find('}', i);
          if (i + 1 >= pattern.size() || pattern[i + 1] != '{' || close == std::string::npos) {
            refuse(fmt::format("\\{} without braces", e));
          }
          const std::string name = pattern.substr(i + 2, close - (i + 2));
          out += fmt::format("\\{}{{{}}}", e, e == 'x' ? name : property_name(name));
          i = close;
          break;
        }
        default: {
          const auto u = static_cast<unsigned char>(e);
          const bool letter_or_digit = (u >= '0' && u <= '9') || ((u | 0x20) >= 'a' && (u | 0x20) <= 'z');
          if (letter_or_digit) refuse(fmt::format("\\{}", e));
          if (u >= 0x80) {
            out += e;  // an escaped non-ASCII character is itself
          } else {
            out += c, out += e;
          }
        }
      }
      continue;
    }
    if (in_class) {
      if (c == '[') refuse("a class inside a class");
      if (c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') refuse("a class intersection");
      if (c == ']' && i == class_begin) refuse("a class that starts with ']'");
      if (c == ']') in_class = false;
    } else if (c == ')') {
      if (groups.size() > 1) groups.pop_back();
    } else if (c == '[') {
      in_class = true;
      class_begin = i + 1;
      if (class_begin < pattern.size() && pattern[class_begin] == '^') ++class_begin;
    } else if (c == '}' && i + 1 < pattern.size() && pattern[i + 1] == '+') {
      refuse("a bounded repeat followed by '+'");
    } else if (c == '(' && i + 1 < pattern.size() && (pattern[i + 1] == '?' || pattern[i + 1] == '*')) {
      // Groups: (?: (?= (?! (?<= (?<! (?> (?i: only.
      const std::string_view rest = std::string_view(pattern).substr(i + 1);
      bool known = false;
      for (const std::string_view group : {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"}) {
        known = known || rest.substr(0, group.size()) == group;
      }
      if (!known) refuse(fmt::format("the group '({}'", rest.substr(0, 3)));
      groups.push_back(groups.back() || rest.starts_with("?i:"));
    } else if (c == '(') {
      groups.push_back(groups.back());
    }
    if (groups.back() && i > 0 && may_fold_to_several(pattern[i - 1], c))
      refuse(fmt::format("'{}' where case is ignored", pattern.substr(i - 1, 2)));
    out += c;
  }
  return out;
}

std::string pcre2_message(int code) {
  char buffer[256];
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(buffer), sizeof buffer);
  return buffer;
}

template <typename T>
T* checked(T* pointer) {
  if (pointer == nullptr) throw OutOfMemory("PCRE2 could not allocate a {}-byte structure", sizeof(void*));
  return pointer;
}

}  // namespace

struct Regex::Compiled {
  std::string pattern;
  std::string place;
  pcre2_code* code = nullptr;
  ~Compiled() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& pattern, const std::string& place) : compiled_(std::make_unique<Compiled>()) {
  compiled_->pattern = pattern;
  compiled_->place = place;
  const std::string translated = to_pcre2(pattern, place);
  int error = 0;
  PCRE2_SIZE offset = 0;
  // PCRE2 calls back before every item of the pattern, and the callback counts steps.
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT;
  compiled_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(), options, &error,
                                  &offset, nullptr);
  if (compiled_->code == nullptr) {
    throw DataCorrupted("{}: pattern {} does not compile: {} at byte {} of {}", place, quote(pattern),
                        pcre2_message(error), offset, quote(translated));
  }
  const int jit = pcre2_jit_compile(compiled_->code, PCRE2_JIT_COMPLETE);
  if (jit != 0 && jit != PCRE2_ERROR_JIT_BADOPTION && jit != PCRE2_ERROR_NOMEMORY) {
    throw DataCorrupted("{}: pattern {}: {}", place, quote(pattern), pcre2_message(jit));
  }
}

Regex::~Regex() = default;

const std::string& Regex::pattern() const { return compiled_->pattern; }

struct Regex::Scanner::State {
  const Compiled& compiled;
  TextWork& work;
  std::string_view text;
  size_t offset = 0;
  size_t pos = 1;                            // beyond the text: nothing to find yet
  size_t last_end = std::string_view::npos;  // of the last match
  size_t last_seen = 0;                      // position at the previous callout
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;  // null until a match needs it

  State(const Compiled& compiled_regex, TextWork& limits) : compiled(compiled_regex), work(limits) {}
  ~State() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }

  // Counts one step, and the distance from the last callout's position. Ends the match when the limit is exceeded.
  static int count_step(pcre2_callout_block* block, void* state) {
    State& s = *static_cast<State*>(state);
    const size_t now = block->current_position;
    s.work.regex_steps += 1 + (now > s.last_seen ? now - s.last_seen : s.last_seen - now);
    s.last_seen = now;
    const bool ends = s.work.regex_steps > s.work.max_regex_steps() || s.work.cancelled();
    return ends ? PCRE2_ERROR_CALLOUT : 0;
  }

  // Matches from `pos` on. Compiled patterns use 32 KiB of the thread's own stack; few need more, and a stack of their
  // own takes longer to make than a short text to match. The match begins again with it, and its steps count once.
  int match() {
    const auto once = [&] {
      last_seen = pos;
      // The text was validated on entry.
      return pcre2_match(compiled.code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), pos, PCRE2_NO_UTF_CHECK,
                         data, context);
    };
    const uint64_t steps = work.regex_steps;
    const int rc = once();
    if (rc != PCRE2_ERROR_JIT_STACKLIMIT || stack != nullptr) return rc;
    stack = checked(pcre2_jit_stack_create(64 << 10, 16 << 20, nullptr));
    pcre2_jit_stack_assign(context, nullptr, stack);
    work.regex_steps = steps;
    return once();
  }

  [[noreturn]] void give_up(int rc) const {
    work.check();
    if (rc == PCRE2_ERROR_CALLOUT) {
      throw InvalidArgument("{}: pattern {} needs more than {} steps on a text of {} bytes; it gave up at byte {}",
                            compiled.place, quote(compiled.pattern), work.max_regex_steps(), work.text_bytes(),
                            offset + last_seen);
    }
    throw InvalidArgument("{}: pattern {} gave up on the text at byte {}: {}", compiled.place, quote(compiled.pattern),
                          offset + pos, pcre2_message(rc));
  }
};

Regex::Scanner::Scanner(const Regex& regex, TextWork& work) : state_(std::make_unique<State>(*regex.compiled_, work)) {
  state_->data = checked(pcre2_match_data_create_from_pattern(regex.compiled_->code, nullptr));
  state_->context = checked(pcre2_match_context_create(nullptr));
  pcre2_set_match_limit(state_->context, UINT32_MAX);  // steps are what is limited
  pcre2_set_heap_limit(state_->context, 64 << 10);     // KiB, for the interpreter
  pcre2_set_callout(state_->context, State::count_step, state_.get());
}

Regex::Scanner::~Scanner() = default;

void Regex::Scanner::scan(std::string_view text, size_t offset) {
  state_->text = text;
  state_->offset = offset;
  state_->pos = 0;
  state_->last_end = std::string_view::npos;
}

bool Regex::Scanner::next(size_t& begin, size_t& end) {
  State& s = *state_;
  while (s.pos <= s.text.size()) {
    s.work.tick();
    const int rc = s.match();
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) s.give_up(rc);
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(s.data);
    begin = range[0];
    end = range[1];
    // An empty match where the last one ended is skipped, and the search continues after the next character.
    if (begin == end && end == s.last_end) {
      if (s.pos >= s.text.size()) break;
      s.pos += static_cast<size_t>(decode_valid_utf8(s.text.data() + s.pos).length);
      continue;
    }
    s.pos = s.last_end = end;
    return true;
  }
  s.pos = s.text.size() + 1;
  return false;
}

}  // namespace eadem::io
