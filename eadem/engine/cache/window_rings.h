// SPDX-License-Identifier: Apache-2.0
//
// WindowRings: window tables for callers that give the blocks of group 0 themselves (InferEngine::Input). Each of
// `rows` sequences gets an equal part of a window group's blocks and goes round in it. A group that has as many blocks
// as group 0 takes its numbers. One thread at a time may use it.
#pragma once

#include <span>
#include <vector>

#include "eadem/modules/state_spec.h"

namespace eadem::engine {

class WindowRings {
 public:
  WindowRings() = default;
  // `places`: the width of tables.
  WindowRings(const modules::CacheSpec& cache, int64_t rows, int64_t places);

  // The blocks of a row in a window group.
  int64_t length(size_t window_group) const { return length_[window_group]; }
  // The tables of the window groups for a sequence with these blocks; valid until the row's next call.
  std::span<const std::vector<int32_t>> tables(int64_t row, std::span<const int32_t> blocks);

 private:
  std::vector<int64_t> length_;                            // per group
  std::vector<bool> follows_;                              // per group: it takes the numbers of group 0
  std::vector<std::vector<std::vector<int32_t>>> tables_;  // [rows][groups][places]
};

}  // namespace eadem::engine
