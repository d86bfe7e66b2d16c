// SPDX-License-Identifier: Apache-2.0
//
// SamplingParams: how the text of one request is sampled. Names, defaults and ranges are equal in C++, Python and, for
// those that it has, on the command line.
//
// A parameter is added here (a field and a line of for_each, unless it is a function), with its range in
// sampling_params.cc and its documentation in python/eadem/_llm.py; the bindings follow from the list.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/engine/request.h"
#include "eadem/engine/text/beam_search.h"
#include "eadem/io/generation_config.h"

namespace eadem::engine {

struct SamplingParams {
  double temperature = 1.0;         // [0, 1e6]; 0 is greedy
  int64_t top_k = 0;                // [0, 2^31); 0 is off
  double top_p = 1.0;               // (0, 1]; 1 is off
  double min_p = 0.0;               // [0, 1]; 0 is off
  double typical_p = 1.0;           // (0, 1]; 1 is off
  double repetition_penalty = 1.0;  // [0.01, 100]; 1 is off. Divides logits of tokens of the prompt and the text
  double presence_penalty = 0.0;    // [-2, 2]; 0 is off. Subtracted from logits of tokens of the text
  double frequency_penalty = 0.0;   // [-2, 2]; 0 is off. Subtracted as often as the text has the token
  std::optional<int64_t> seed;      // none: a fresh one per request, reported in the result
  int64_t max_tokens = 256;         // [1, 2^31)
  std::vector<std::string> stop;    // strings that end the text, also across tokens; not part of it
  std::vector<int64_t> stop_token_ids;
  bool ignore_eos = false;
  // [-100, 100] by token, added to its logit before anything else: at -100 a token is hardly ever drawn, at 100 hardly
  // any other one. At most 300 tokens
  std::map<int64_t, double> logit_bias;
  // [0, max_tokens]; as long as the text has fewer tokens, neither the end of sequence nor a token of stop_token_ids is
  // drawn, and stop strings do not end it
  int64_t min_tokens = 0;
  // Texts that no answer has, spelled at the start of a word or behind a space as the tokenizer spells them: the token
  // that would complete one is not drawn, also where the prompt begins it. And the same as tokens; a word that is the
  // end of sequence alone is none (as in transformers). At most 1024 spellings, with the biases
  std::vector<std::string> bad_words;
  std::vector<std::vector<int64_t>> bad_words_ids;
  std::optional<std::vector<int64_t>> allowed_token_ids;  // no others are drawn; at least one
  int64_t logprobs = 0;                    // [0, 20]; likeliest tokens that are listed for each place of the text
  std::optional<int64_t> prompt_logprobs;  // [0, 20], likewise of the prompt, with the log-probabilities of its tokens
  // [1, 16]; more than 1: beam search, which draws nothing (temperature 0) and gives the n best of so many beams. With
  // defaults of what else changes logits, without stop strings and prompt_logprobs
  int64_t num_beams = 1;
  double length_penalty = 1.0;  // [-10, 10]; a beam's score is its log-probability / tokens^length_penalty
  EarlyStopping early_stopping = EarlyStopping::no;  // text/beam_search.h
  // [1, 1024]; answers to each prompt, which share what the cache holds of it. Answer j has the seed `seed` + j
  int64_t n = 1;
  // Called in order for each row of logits of the request (step_sequence.h, request.h), on the thread of whichever call
  // drives the steps. An exception fails the request alone.
  std::vector<LogitsProcessor> logits_processors;
  TokenMask token_mask;

  // Calls visit(name, field) for each field of `params`, a SamplingParams, in the order above.
  template <typename Params, typename Visit>
  static void for_each(Params& params, Visit visit) {
    visit("temperature", params.temperature);
    visit("top_k", params.top_k);
    visit("top_p", params.top_p);
    visit("min_p", params.min_p);
    visit("typical_p", params.typical_p);
    visit("repetition_penalty", params.repetition_penalty);
    visit("presence_penalty", params.presence_penalty);
    visit("frequency_penalty", params.frequency_penalty);
    visit("seed", params.seed);
    visit("max_tokens", params.max_tokens);
    visit("stop", params.stop);
    visit("stop_token_ids", params.stop_token_ids);
    visit("ignore_eos", params.ignore_eos);
    visit("logit_bias", params.logit_bias);
    visit("min_tokens", params.min_tokens);
    visit("bad_words", params.bad_words);
    visit("bad_words_ids", params.bad_words_ids);
    visit("allowed_token_ids", params.allowed_token_ids);
    visit("logprobs", params.logprobs);
    visit("prompt_logprobs", params.prompt_logprobs);
    visit("num_beams", params.num_beams);
    visit("length_penalty", params.length_penalty);
    visit("n", params.n);
  }

  // Throws InvalidArgument naming the field, its value and its range; Unsupported for what beam search does not go
  // with.
  void validate() const;

  void validate_beams() const;  // a part of validate()
  std::string not_with_beams() const;

  // The settings that kernels read, for a request whose seed is `request_seed`.
  kernels::SampleSettings settings(int64_t request_seed) const;

  // The biases that logit_bias, min_tokens and the bad words of one token stand for, where `eos` ends a sequence;
  // `words`: all bad words as tokens.
  std::vector<TokenBias> biases(std::span<const int32_t> eos, std::span<const std::vector<int32_t>> words = {}) const;

  // The recommendation of the model's authors, applied over the defaults. `log` receives a warning, with the reason,
  // for each key of the file that changes sampling and is not honoured. Throws DataCorrupted, naming `source`, for a
  // value out of range.
  static SamplingParams from_generation_config(const io::GenerationConfig& config, const std::string& source,
                                               const Logger& log);
};

// Throws InvalidArgument unless so many likeliest tokens can be listed.
void require_top_logprobs(int64_t count);

// Throws InvalidArgument naming the field, its value and its range. The ranges are those of SamplingParams.
void check_range(const kernels::SampleSettings& settings);

// The settings in force, for people: "temperature 0.8, top_k 40, top_p 0.95, min_p 0, max_tokens 256", and the
// penalties that are on.
std::string to_string(const SamplingParams& params);

}  // namespace eadem::engine
