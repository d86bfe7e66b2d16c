// SPDX-License-Identifier: Apache-2.0
//
// Pre-tokenizer patterns on PCRE2. The patterns in tokenizer.json are written for Oniguruma (Ruby syntax);
// `Regex` rewrites the few escapes whose meaning differs and refuses what it cannot prove equal.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace eadem::io {

// A compiled pattern: immutable, safe to share between threads. Compiled with JIT where the CPU has one.
class Regex {
 public:
  // `place` names the file and field for messages. Throws Unsupported on syntax whose Oniguruma meaning
  // PCRE2 does not share (\h, \b, nested classes ...) and DataCorrupted on a pattern that does not compile.
  Regex(const std::string& pattern, const std::string& place);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  const std::string& pattern() const;

  // One scan over one text; not shared between threads.
  class Scanner {
   public:
    // `text` must be valid UTF-8 and outlive the scanner.
    Scanner(const Regex& regex, std::string_view text);
    ~Scanner();
    Scanner(const Scanner&) = delete;
    Scanner& operator=(const Scanner&) = delete;

    // The next non-empty match, left to right. False at the end of the text. Throws InvalidArgument naming
    // the byte offset when a match needs more than kMatchLimit steps.
    bool next(size_t& begin, size_t& end);

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

  // Steps one match may take. PCRE2's own default; linear patterns stay far below it per match.
  static constexpr unsigned kMatchLimit = 10'000'000;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace eadem::io
