// SPDX-License-Identifier: Apache-2.0
//
// generation_config.json: the sampling defaults that a model's authors recommend.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::io {

// A field is empty when the file does not set it (or sets it to null).
struct GenerationConfig {
  std::optional<bool> do_sample;
  std::optional<double> temperature;                // >= 0; 0 is greedy
  std::optional<int64_t> top_k;                     // >= 0; 0 is off
  std::optional<double> top_p;                      // (0, 1]
  std::optional<double> min_p;                      // [0, 1]
  std::optional<double> typical_p;                  // (0, 1]
  std::optional<double> repetition_penalty;         // > 0; 1 is off
  std::optional<int64_t> max_new_tokens;            // >= 1
  std::optional<int64_t> min_new_tokens;            // >= 0
  std::optional<int64_t> max_length;                // >= 1, prompt included
  std::optional<int64_t> min_length;                // >= 0, prompt included
  std::vector<std::vector<int64_t>> bad_words_ids;  // none of them empty
  std::vector<int64_t> suppress_tokens;             // never drawn; one id or a list
  std::vector<std::string> stop_strings;            // a string or a list
  std::optional<int64_t> num_return_sequences;      // >= 1
  std::optional<int64_t> num_beams;                 // >= 1
  std::optional<double> length_penalty;
  std::optional<std::string> early_stopping;  // "true", "false" or "never"
  std::optional<int64_t> bos_token_id;
  std::optional<int64_t> pad_token_id;  // empty for -1 too, as old Llama files write "none"
  std::vector<int64_t> eos_token_ids;   // `eos_token_id`, which is one id or a list

  // Keys that are not listed above, so that a caller can report them. Notes of provenance
  // (transformers_version, _from_model_config, _commit_hash) do not count.
  std::vector<std::string> unknown_keys;
};

// Throws DataCorrupted for malformed JSON, a wrong type or a value out of range, naming `file`, key, value and range.
GenerationConfig parse_generation_config(std::string_view text, const std::string& file);

// Throws NotFound or IoError as well.
GenerationConfig read_generation_config(const std::string& path);

}  // namespace eadem::io
