// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace eadem::engine {

namespace {

struct Continuation {
  size_t beam;
  TokenLogprob next;
  double score;
};

Beam continued(const Beam& beam, const Continuation& by, const std::vector<TokenLogprob>& candidates) {
  Beam result = beam;
  result.tokens.push_back(by.next.token);
  result.logprobs.push_back(by.next.logprob);
  result.next.push_back(candidates);
  result.score = by.score;
  return result;
}

}  // namespace

BeamSearch::BeamSearch(BeamOptions options) : options_(std::move(options)), running_(1) {}

void BeamSearch::advance(std::span<const std::vector<TokenLogprob>> next) {
  const int64_t length = std::ssize(running_[0].tokens) + 1;
  // 1. The continuations of all beams, best first, of equals those of the first beam and the smaller token.
  std::vector<Continuation> all;
  for (size_t beam = 0; beam < running_.size(); ++beam)
    for (const TokenLogprob& each : next[beam])
      if (length > options_.min_tokens || !options_.ends.contains(each.token))
        all.push_back({beam, each, running_[beam].score + static_cast<double>(each.logprob)});
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.score > b.score; });

  // 2. Those among the first num_beams that end are finished; the best num_beams of those that do not end run on.
  const auto num_beams = static_cast<size_t>(options_.num_beams);
  std::vector<Beam> running;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool ends = length >= options_.max_tokens || options_.ends.contains(all[i].next.token);
    if (!ends && running.size() < num_beams)
      running.push_back(continued(running_[all[i].beam], all[i], next[all[i].beam]));
    if (!ends || i >= num_beams) continue;
    finished_.push_back(continued(running_[all[i].beam], all[i], next[all[i].beam]));
    finished_.back().score /= std::pow(static_cast<double>(length), options_.length_penalty);
  }
  std::stable_sort(finished_.begin(), finished_.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
  if (finished_.size() > num_beams) finished_.resize(num_beams);
  running_ = std::move(running);

  // 3. Whether to go on.
  const bool full = finished_.size() == num_beams;
  ended_ = running_.empty() || (full && (options_.early_stopping == EarlyStopping::yes || !can_improve()));
}

// Whether the best running beam may become better than the worst finished one, judged by its log-probability so far.
bool BeamSearch::can_improve() const {
  const bool at_most_length = options_.early_stopping == EarlyStopping::never && options_.length_penalty > 0;
  const auto length = static_cast<double>(at_most_length ? options_.max_tokens : std::ssize(running_[0].tokens));
  return running_[0].score / std::pow(length, options_.length_penalty) > finished_.back().score;
}

}  // namespace eadem::engine
