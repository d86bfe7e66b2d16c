// SPDX-License-Identifier: Apache-2.0
//
// Watches a growing text for stop strings. Text that could still become one is held back, so that nothing is shown
// that belongs to a stop string, however the text is cut into pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace eadem::engine {

class StopWatcher {
 public:
  // `stops`: no empty ones; they must outlive the watcher.
  explicit StopWatcher(const std::vector<std::string>& stops) : stops_(stops) {}

  // Takes the next piece; returns what may be shown. The text ends before the stop string that is complete first (of
  // several that end together, before the one that begins first); from then on `stopped()`, and nothing is returned.
  std::string feed(std::string_view piece);
  // The end of the text: what was held back was no stop string.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string>& stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace eadem::engine
