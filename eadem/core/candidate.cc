// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/candidate.h"

#include <algorithm>

namespace eadem {

std::string to_string(const Decision& decision) {
  size_t width = 0;
  for (const Decision::Answer& answer : decision.answers) width = std::max(width, answer.candidate.size());
  const std::string indent(decision.subject.size() + 2, ' ');
  std::string text;
  for (size_t i = 0; i < decision.answers.size(); ++i) {
    const auto& [candidate, verdict] = decision.answers[i];
    text += i == 0 ? decision.subject + ": " : indent;
    text += verdict.accepted ? fmt::format("{:<{}} yes  modelled {:.1f} us{}\n", candidate, width, verdict.cost_us,
                                           decision.chosen == i && decision.answers.size() > 1 ? "  (chosen)" : "")
                             : fmt::format("{:<{}} no   {}\n", candidate, width, verdict.reason);
  }
  if (decision.answers.empty()) text = decision.subject + ": no candidates\n";
  return text;
}

void throw_no_candidate(const Decision& decision) {
  throw Unsupported("nothing here can run {}:\n{}", decision.subject, to_string(decision));
}

}  // namespace eadem
