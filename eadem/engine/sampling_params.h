// SPDX-License-Identifier: Apache-2.0
//
// SamplingParams: how the text of one request is sampled. Names, defaults and ranges are equal in C++, Python and on
// the command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/io/generation_config.h"
#include "eadem/ops/sample.h"

namespace eadem::engine {

struct SamplingParams {
  double temperature = 1.0;         // [0, 1e6]; 0 is greedy
  int64_t top_k = 0;                // [0, 2^31); 0 is off
  double top_p = 1.0;               // (0, 1]; 1 is off
  double min_p = 0.0;               // [0, 1]; 0 is off
  double repetition_penalty = 1.0;  // [0.01, 100]; 1 is off. Divides logits of tokens of the prompt and the text
  double presence_penalty = 0.0;    // [-2, 2]; 0 is off. Subtracted from logits of tokens of the text
  double frequency_penalty = 0.0;   // [-2, 2]; 0 is off. Subtracted as often as the text has the token
  std::optional<int64_t> seed;      // none: a fresh one per request, reported in the result
  int64_t max_tokens = 256;         // [1, 2^31)
  std::vector<std::string> stop;    // strings that end the text, also across tokens; not part of it
  std::vector<int64_t> stop_token_ids;
  bool ignore_eos = false;

  // Throws InvalidArgument naming the field, its value and its range.
  void validate() const;

  // The settings that kernels read, for a request whose seed is `request_seed`.
  kernels::SampleSettings settings(int64_t request_seed) const;

  // The recommendation of the model's authors, applied over the defaults. `log` receives a warning, with the reason,
  // for each key of the file that changes sampling and is not honoured. Throws DataCorrupted, naming `source`, for a
  // value out of range.
  static SamplingParams from_generation_config(const io::GenerationConfig& config, const std::string& source,
                                               const Logger& log);
};

// Throws InvalidArgument naming the field, its value and its range. The ranges are those of SamplingParams.
void check_range(const kernels::SampleSettings& settings);

// The settings in force, for people: "temperature 0.8, top_k 40, top_p 0.95, min_p 0, max_tokens 256", and the
// penalties that are on.
std::string to_string(const SamplingParams& params);

}  // namespace eadem::engine
