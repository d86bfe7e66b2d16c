// SPDX-License-Identifier: Apache-2.0
//
// The options that say how text is sampled, shared by `run` and `chat`, and by the command /set of a chat.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "eadem/cli/options/arguments.h"
#include "eadem/engine/sampling_params.h"

namespace eadem::cli {

struct SamplingOptions {
  std::optional<int64_t> max_tokens, min_tokens, top_k, num_beams, seed;
  std::optional<int64_t> n, logprobs, prompt_logprobs;  // which add() does not offer: a conversation has none of them
  std::optional<double> temperature, top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty,
      length_penalty;
  std::vector<std::string> stop, bad_words;
  std::vector<std::string> allowed_token_ids, stop_token_ids;  // "ID" or "ID,ID"
  std::vector<std::string> logit_bias;                         // "ID=X", "ID+X" or "ID-X"
  bool ignore_eos = false;

  // `usual_max_tokens` is for the help: what happens without --max-tokens.
  void add(Arguments& arguments, const std::string& usual_max_tokens);
  // Returns `params` with what was given set over it. --max-tokens -1, until the text ends, becomes `context`. Throws
  // InvalidArgument as SamplingParams::validate, and UsageError for a --logit-bias, --allowed-token-ids or
  // --stop-token-ids that is none.
  engine::SamplingParams over(engine::SamplingParams params, int64_t context) const;
  // Throws UsageError, naming the option, for values out of range.
  void check() const;
};

// A seed for those who gave none.
int64_t fresh_seed();

}  // namespace eadem::cli
