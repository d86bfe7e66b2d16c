// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/stop_watcher.h"

#include <algorithm>
#include <utility>

namespace eadem::engine {

std::string StopWatcher::feed(std::string_view piece) {
  if (stopped_) return {};
  held_ += piece;
  size_t begin = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos || at + stop.size() > end) continue;
    begin = at + stop.size() < end ? at : std::min(begin, at);
    end = at + stop.size();
  }
  if (begin != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, {}).substr(0, begin);
  }
  size_t keep = 0;
  for (const std::string& stop : stops_)
    for (size_t length = std::min(stop.size() - 1, held_.size()); length > keep; --length)
      if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, length))) keep = length;
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopWatcher::finish() { return std::exchange(held_, {}); }

}  // namespace eadem::engine
