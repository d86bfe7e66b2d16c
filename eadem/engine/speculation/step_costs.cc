// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/step_costs.h"

#include <algorithm>
#include <iterator>

namespace eadem::engine {

void StepCosts::Value::observe(double measured) {
  if (count == 0) seconds = measured;
  count = std::min<int64_t>(count + 1, 8);
  seconds += (std::clamp(measured, seconds / 2, seconds * 2) - seconds) / static_cast<double>(count);
}

void StepCosts::observe(int64_t sequences, int64_t rows, double seconds) {
  (rows == sequences ? plain_[sequences] : drafted_[rows]).observe(seconds);
}

// A plain step is the least that there is: what takes less was measured badly.
StepCosts::Near StepCosts::near(int64_t sequences, int64_t rows) const {
  const double least = plain(sequences);
  Near near{.below_rows = sequences, .below = least};
  if (rows == sequences) return near;
  auto above = drafted_.upper_bound(rows);
  if (above != drafted_.end()) {
    near.above_rows = above->first;
    near.above = std::max(least, above->second.seconds);
  }
  if (above == drafted_.begin() || std::prev(above)->first <= sequences) return near;
  near.below_rows = std::prev(above)->first;
  near.below = std::max(least, std::prev(above)->second.seconds);
  return near;
}

double StepCosts::expected(int64_t sequences, int64_t rows) const {
  const Near n = near(sequences, rows);
  const auto further = static_cast<double>(rows - n.below_rows);
  if (n.above_rows == 0) return n.below + further * plain(sequences) / 8;
  return n.below + further / static_cast<double>(n.above_rows - n.below_rows) * (std::max(n.below, n.above) - n.below);
}

double StepCosts::worst(int64_t sequences, int64_t rows) const {
  const Near n = near(sequences, rows);
  const double alone = n.below + static_cast<double>(rows - n.below_rows) * plain(sequences);
  return n.above_rows == 0 ? alone : std::min(alone, std::max(n.below, n.above));
}

}  // namespace eadem::engine
