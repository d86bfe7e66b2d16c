// SPDX-License-Identifier: Apache-2.0
//
// Keys of a config.json that have no meaning for what a model computes. One table (config_keys.cc) lists them with the
// model types that they occur in, the values at which they mean nothing, and the reason. A key that is neither read nor
// in the table is refused by name, because it might change results.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/json.h"

namespace eadem::models {

struct IgnoredKey {
  std::string path;  // "use_cache", "quantization_config.damp_percent"
  std::string reason;
  bool usual = true;  // transformers writes it; false for keys of other programs, which are worth a word when loading
};

// Marks the keys of the table that `config` has as ignored. Throws Unsupported for one whose value would mean
// something, naming the key, its value and the values that mean nothing. Defaults of generation mean nothing where a
// generation_config.json lies beside the file.
void ignore_inert_keys(const io::JsonReader& config, std::string_view model_type);

// Does the same for the keys of `rope_scaling` or `rope_parameters` that scaling of type `rope_type` does not read.
void ignore_inert_rope_keys(const io::JsonReader& rope, std::string_view rope_type);

// Lists the keys that were ignored while `config` was read, in the order of reading.
std::vector<IgnoredKey> ignored_keys(const io::JsonReader& config);

// One line that names the unusual keys among them; empty when there is none.
std::string unusual_keys_notice(const std::vector<IgnoredKey>& keys, const std::string& file);

}  // namespace eadem::models
