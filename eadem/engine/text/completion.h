// SPDX-License-Identifier: Apache-2.0
//
// Completion: the answer to one prompt. GenerationStats: what a call took.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::engine {

enum class FinishReason : uint8_t {
  length,     // max_tokens, or the context is full
  stop,       // end of sequence, a stop token or a stop string
  cancelled,  // asked to stop
  error,      // the request failed alone; see Completion::error
};

std::string_view finish_reason_name(FinishReason reason);

struct TokenLogprob {
  int32_t token;
  float logprob;
  bool operator==(const TokenLogprob&) const = default;
};

struct Completion {
  std::string text;
  std::vector<int32_t> token_ids;  // sampled tokens, without the one that ended the text
  std::vector<float> logprobs;     // of token_ids
  // The likeliest tokens at the place of each of token_ids, in falling order; empty unless SamplingParams::logprobs
  // asks.
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  // Log-probabilities of the prompt's tokens, and the likeliest tokens at each place. The first token has NaN and an
  // empty list. Both are empty unless SamplingParams::prompt_logprobs is set.
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;
  FinishReason finish_reason = FinishReason::length;
  std::string error;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;    // of the prompt, found in the cache
  int64_t proposed_tokens = 0;  // computed beside those of the text (speculation)
  int64_t accepted_tokens = 0;  // those of them that became part of it
  int64_t seed = 0;             // the seed that was used
  double score = 0;             // of a beam search: the log-probability / tokens^length_penalty
};

// Wall times of one call, seconds, and the tokens of its requests. A step that several calls share counts for each.
struct GenerationStats {
  double tokenize_seconds = 0;
  double first_token_seconds = 0;  // from the start to the first sampled token of any request
  double prompt_seconds = 0;       // time of steps with prompt tokens
  double decode_seconds = 0;       // time of steps without prompt tokens
  int64_t prompt_tokens = 0;       // computed in these steps
  int64_t reused_tokens = 0;       // of prompts, found in the cache
  int64_t decode_tokens = 0;       // tokens sampled in decode steps
  int64_t proposed_tokens = 0;     // computed beside them (speculation)
  int64_t accepted_tokens = 0;     // proposed tokens that were sampled

  // Tokens that a decode step brought each request that it computed.
  double tokens_per_step() const {
    const int64_t steps = decode_tokens - accepted_tokens;
    return steps > 0 ? static_cast<double>(decode_tokens) / static_cast<double>(steps) : 0.0;
  }
};

}  // namespace eadem::engine
