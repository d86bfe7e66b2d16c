// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/candidate.h"

#include <algorithm>

namespace eadem {

namespace {

// The mark of answer `i`; a choice among one needs none.
std::string_view mark_of(const Decision& decision, size_t i) {
  if (decision.chosen != i || decision.answers.size() == 1) return "";
  const double cost_us = decision.answers[i].verdict.cost_us;
  const auto equals = std::count_if(decision.answers.begin(), decision.answers.end(), [&](const auto& other) {
    return other.verdict.accepted && other.verdict.cost_us == cost_us;
  });
  return equals > 1 ? "  (chosen; first of equals)" : "  (chosen)";
}

}  // namespace

std::string to_string(const Decision& decision) {
  size_t width = 0;
  for (const Decision::Answer& answer : decision.answers) width = std::max(width, answer.candidate.size());
  const std::string indent(decision.subject.size() + 2, ' ');
  std::string text;
  for (size_t i = 0; i < decision.answers.size(); ++i) {
    const auto& [candidate, verdict] = decision.answers[i];
    text += i == 0 ? decision.subject + ": " : indent;
    if (!verdict.accepted) {
      text += fmt::format("{:<{}} no   {}\n", candidate, width, verdict.reason);
      continue;
    }
    const std::string reason = verdict.reason.empty() ? "" : fmt::format(" ({})", verdict.reason);
    text += fmt::format("{:<{}} yes  modelled {:.1f} us{}{}\n", candidate, width, verdict.cost_us, reason,
                        mark_of(decision, i));
  }
  if (decision.answers.empty()) text = decision.subject + ": no candidates\n";
  return text;
}

void throw_no_candidate(const Decision& decision) {
  throw Unsupported("nothing here can run {}:\n{}", decision.subject, to_string(decision));
}

}  // namespace eadem
