// SPDX-License-Identifier: Apache-2.0
//
// GenerationRequest: a prompt to continue, as token ids, and the states that it passes through.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/engine/step_sequence.h"

namespace eadem::engine {

// Says which tokens may follow `tokens`, those of the sequence so far: clears bits of `allowed`, whose bit t % 32 of
// word t / 32 stands for token t. A grammar is one. Called once for each token that is drawn, between two steps; an
// exception fails the request alone, and so does a mask that allows nothing.
using TokenMask = std::function<void(std::span<const int32_t> tokens, std::span<int32_t> allowed)>;

// Masks as words: of every token, of some, and how many one allows.
std::vector<int32_t> all_tokens(int64_t vocab);
std::vector<int32_t> only_tokens(std::span<const int64_t> tokens, int64_t vocab);  // each in [0, vocab)
int64_t num_allowed(std::span<const int32_t> words, int64_t vocab);

struct GenerationRequest {
  std::vector<int32_t> prompt;                       // at least one token
  SamplingInput sampling;                            // greedy unless set; the scheduler sets its prompt_length
  std::vector<TokenBias> biases;                     // of logit_bias and for min_tokens
  std::vector<std::vector<int32_t>> bad_words = {};  // of two tokens or more; no answer completes one
  std::vector<int32_t> allowed = {};                 // the mask of the tokens that may be drawn; empty: all of them
  TokenMask token_mask = {};                         // more of them; null: none
  LogitsProcessor processor = {};                    // null: none
  // Log-probabilities of the tokens of the prompt are wanted, with so many likeliest ones at each place. The prompt is
  // computed from its first token then.
  std::optional<int32_t> prompt_logprobs = {};
  int64_t max_tokens = 1;  // at least 1
  bool keep = false;       // continue from the kept sequence, and become it at the end
  int64_t priority = 0;    // the greater goes first, until it has overtaken others for too long
  std::string cache_salt;  // blocks of the cache are shared by requests of one salt only
};

using RequestId = int64_t;

// A request waits, reads its prompt, decodes, and ends in one of three ways. It may end from every state before, and be
// preempted from every state between.
enum class RequestState : uint8_t {
  waiting,     // for a place in the batch, a share of a step or room in the cache
  prefilling,  // several of its tokens are not in the cache
  decoding,    // each step feeds back the token that was sampled before
  preempted,   // waits as before, since others needed its room; its tokens are computed again
  finished,    // by max_tokens, by the end of the context, or because its caller has all that it wants
  failed,      // its logits were not finite, or its step threw
  cancelled,   // its caller asked for it
};
inline constexpr size_t kNumRequestStates = 7;

std::string_view request_state_name(RequestState state);

}  // namespace eadem::engine
