// SPDX-License-Identifier: Apache-2.0
//
// Watches a growing text for stop strings. Text that may still become one is held back, so that no part of a stop
// string is ever returned, however the text is divided into pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace eadem::engine {

class StopWatcher {
 public:
  // `stops` holds no empty strings; the vector must outlive the watcher.
  explicit StopWatcher(const std::vector<std::string>& stops) : stops_(stops) {}

  // Takes the next piece and returns the text that may be shown. The text ends before the stop string that is completed
  // first; if several end together, before the one that begins first. After that stopped() is true and nothing is
  // returned.
  std::string feed(std::string_view piece);
  // Ends the text and returns what was held back, which was no stop string.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string>& stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace eadem::engine
