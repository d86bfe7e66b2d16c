// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/prompt_lookup.h"

#include <iterator>

namespace eadem::engine {

namespace {

constexpr int64_t kMostEqual = 4;
// A single equal token says little: most of what would be proposed after it would be computed for nothing.
constexpr int64_t kLeastEqual = 2;

// How many tokens up to position `end` are the last ones of all, at most kMostEqual.
int64_t equal_before(std::span<const int32_t> tokens, int64_t end) {
  const auto at = [&](int64_t position) { return tokens[static_cast<size_t>(position)]; };
  int64_t count = 0;
  while (count < kMostEqual && count <= end && at(end - count) == at(std::ssize(tokens) - 1 - count)) ++count;
  return count;
}

}  // namespace

void look_up(std::vector<int32_t>& drafts, std::span<const int32_t> tokens, int64_t depth) {
  int64_t best = -1, most = kLeastEqual - 1;
  for (int64_t end = std::ssize(tokens) - 2; end >= 0 && most < kMostEqual; --end) {
    const int64_t equal = equal_before(tokens, end);
    if (equal <= most) continue;
    most = equal;
    best = end;
  }
  drafts.clear();
  if (best < 0) return;
  for (int64_t from = best + 1; std::ssize(drafts) < depth; ++from)
    drafts.push_back(from < std::ssize(tokens) ? tokens[static_cast<size_t>(from)]
                                               : drafts[static_cast<size_t>(from - std::ssize(tokens))]);
}

void PromptLookup::propose(std::span<Proposal> proposals) {
  for (Proposal& each : proposals) look_up(each.drafts, each.tokens, each.depth);
}

}  // namespace eadem::engine
