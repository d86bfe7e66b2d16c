// SPDX-License-Identifier: Apache-2.0
//
// Pre-tokenizer patterns on PCRE2. The patterns in tokenizer.json are written for Oniguruma (Ruby syntax);
// `Regex` rewrites the few escapes whose meaning differs and refuses what it cannot prove equal.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "eadem/io/tokenizer/text_work.h"

namespace eadem::io {

// A compiled pattern: immutable, safe to share between threads. Compiled with JIT where the CPU has one.
//
// Matching is bounded. A step is an item of the pattern that the matcher tries, or a character that it passes or goes
// back over; TextWork limits the steps of all patterns on one text, because a limit for each match does not limit a
// text in which every byte begins an attempt.
class Regex {
 public:
  // `place` names the file and field for messages. Throws Unsupported on syntax whose Oniguruma meaning
  // PCRE2 does not share (\h, \K, nested classes ...) and DataCorrupted on a pattern that does not compile.
  Regex(const std::string& pattern, const std::string& place);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  const std::string& pattern() const;

  // Scans texts one after another; not shared between threads.
  class Scanner {
   public:
    // Both must outlive the scanner.
    Scanner(const Regex& regex, TextWork& work);
    ~Scanner();
    Scanner(const Scanner&) = delete;
    Scanner& operator=(const Scanner&) = delete;

    // Starts over with another text, which must be valid UTF-8 and outlive the scan. `offset` is its place in the text
    // that messages count from.
    void scan(std::string_view text, size_t offset = 0);

    // The next match, left to right. A match may be empty, though not where the one before it ends. False at the end
    // of the text. Throws InvalidArgument, naming the pattern and the byte offset, when work.max_regex_steps() are
    // used up or one match needs more than PCRE2's own limits on memory; Cancelled, see TextWork.
    bool next(size_t& begin, size_t& end);

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace eadem::io
