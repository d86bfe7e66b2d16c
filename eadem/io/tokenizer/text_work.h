// SPDX-License-Identifier: Apache-2.0
//
// TextWork: the limits of one call on one text, and whether the call was cancelled.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "eadem/core/error.h"

namespace eadem::io {

// Passed to every function that reads the text; each loop calls tick() once per iteration. One thread at a time.
class TextWork {
 public:
  // `text_bytes`: the size of the caller's text; the limits are linear in it. `cancel`: see EncodeOptions.
  explicit TextWork(size_t text_bytes, const std::atomic<bool>* cancel = nullptr)
      : text_bytes_(text_bytes), cancel_(cancel) {}

  // Throws Cancelled once the flag is set.
  void check() const {
    if (cancelled()) throw Cancelled("interrupted");
  }
  // check() on every 1024th call.
  void tick() {
    if ((++ticks_ & 1023) == 0) check();
  }
  bool cancelled() const { return cancel_ != nullptr && cancel_->load(std::memory_order_relaxed); }

  size_t text_bytes() const { return text_bytes_; }

  // A text may grow to this many bytes on its way to the model. The largest factor of a Unicode normal form is 11
  // (U+FDFA under NFKC), that of Metaspace is 3; the rest is room for prefixes of short texts.
  size_t max_bytes() const { return kMaxGrowth * text_bytes_ + kMinGrowthLimit; }

  // Steps of pattern matching: see Regex. The patterns of real tokenizers need 2 to 12 a byte of English.
  uint64_t max_regex_steps() const { return kRegexStepsPerByte * text_bytes_ + kMinRegexSteps; }
  uint64_t regex_steps = 0;  // spent so far, by all patterns together

 private:
  static constexpr size_t kMaxGrowth = 32;
  static constexpr size_t kMinGrowthLimit = size_t{1} << 20;
  static constexpr uint64_t kRegexStepsPerByte = 500;
  static constexpr uint64_t kMinRegexSteps = 4'000'000;

  size_t text_bytes_;
  const std::atomic<bool>* cancel_;
  uint32_t ticks_ = 0;
};

}  // namespace eadem::io
