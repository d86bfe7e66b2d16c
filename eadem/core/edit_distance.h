// SPDX-License-Identifier: Apache-2.0
//
// How alike names are, for errors that say what was meant. Thread-safe.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>

namespace eadem {

// Levenshtein's distance, with a swap of neighbours as one step (optimal string alignment). In a pattern, "*" stands
// for any characters and "?" for one, at no cost.
size_t edit_distance(std::string_view text, std::string_view name, bool is_pattern = false);

// The three names with the least distance to `text`, as an error lists them: "'a', 'b', 'c'"; "none" where there are no
// names. Of each, the first 256 characters count.
std::string nearest_names(std::string_view text, const std::set<std::string>& names, bool is_pattern = false);

}  // namespace eadem
