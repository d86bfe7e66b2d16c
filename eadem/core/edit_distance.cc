// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/edit_distance.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace eadem {

size_t edit_distance(std::string_view text, std::string_view name, bool is_pattern) {
  // d[i][j]: of the first i characters of the text and the first j of the name.
  std::vector<std::vector<size_t>> d(text.size() + 1, std::vector<size_t>(name.size() + 1));
  for (size_t j = 0; j <= name.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= text.size(); ++i) {
    const char c = text[i - 1];
    const bool any = is_pattern && c == '*', one = is_pattern && c == '?';
    d[i][0] = d[i - 1][0] + (any ? 0 : 1);
    for (size_t j = 1; j <= name.size(); ++j) {
      if (any) {
        d[i][j] = std::min(d[i - 1][j], d[i][j - 1]);
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (c == name[j - 1] || one ? 0 : 1)});
      if (i > 1 && j > 1 && c == name[j - 2] && text[i - 2] == name[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[text.size()][name.size()];
}

std::string nearest_names(std::string_view text, const std::set<std::string>& names, bool is_pattern) {
  constexpr size_t kMost = 3, kMostCharacters = 256;  // a file may have a name of megabytes
  text = text.substr(0, kMostCharacters);
  std::vector<std::pair<size_t, std::string_view>> order;
  order.reserve(names.size());
  for (const std::string& name : names)
    order.emplace_back(edit_distance(text, std::string_view(name).substr(0, kMostCharacters), is_pattern), name);
  const size_t count = std::min(kMost, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end());
  std::string list;
  for (size_t i = 0; i < count; ++i) list += fmt::format("{}'{}'", i == 0 ? "" : ", ", order[i].second);
  return list.empty() ? "none" : list;
}

}  // namespace eadem
