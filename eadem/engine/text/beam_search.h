// SPDX-License-Identifier: Apache-2.0
//
// BeamSearch: which continuations of one prompt a beam search follows, and which it gives. It knows neither engine nor
// tokens' texts: who has it computes the likeliest next tokens of each running beam and hands them in. The rules are
// those of transformers' generate with num_beams and do_sample=False (Sutskever et al. 2014; the length penalty of Wu
// et al. 2016 without its constants). One thread at a time may use a search.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "eadem/engine/text/completion.h"

namespace eadem::engine {

enum class EarlyStopping : uint8_t {
  no,     // ends when the best running beam, at its length, is worse than every finished one
  yes,    // ends with as many finished beams as there are beams
  never,  // ends when no running beam can become better than a finished one at any length
};

struct BeamOptions {
  int64_t num_beams = 1;
  double length_penalty = 1.0;  // a finished beam's score is its log-probability / tokens^length_penalty
  EarlyStopping early_stopping = EarlyStopping::no;
  int64_t max_tokens = 1;
  int64_t min_tokens = 0;       // a beam does not end before it has so many
  std::set<int32_t> ends = {};  // tokens that end a beam
};

struct Beam {
  std::vector<int32_t> tokens;  // with the one that ended it
  std::vector<float> logprobs;
  std::vector<std::vector<TokenLogprob>> next;  // the candidates at the place of each token
  double score = 0;                             // the sum of logprobs; of a finished beam with the length penalty
};

class BeamSearch {
 public:
  explicit BeamSearch(BeamOptions options);

  // As many candidates as advance() needs of each beam.
  int64_t num_candidates() const { return options_.num_beams + static_cast<int64_t>(options_.ends.size()); }
  bool has_ended() const { return ended_; }
  std::span<const Beam> running() const { return running_; }
  // `next`: for each running beam its likeliest next tokens, num_candidates() unless the vocabulary has fewer.
  void advance(std::span<const std::vector<TokenLogprob>> next);
  // The best beams first; as many as there are beams, once the search has ended.
  std::span<const Beam> finished() const { return finished_; }

 private:
  bool can_improve() const;

  BeamOptions options_;
  std::vector<Beam> running_, finished_;
  bool ended_ = false;
};

}  // namespace eadem::engine
