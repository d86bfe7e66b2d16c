// SPDX-License-Identifier: Apache-2.0
//
// The one selection mechanism. Kernels of an op, strategies of a factory: a candidate says for a request
// either *yes, at this modelled cost* or *no, because …*, candidates stand in an explicit list, and the choice and
// every refusal are kept, so that `explain` and error messages can print them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/error.h"

namespace eadem {

struct Verdict {
  bool accepted = false;
  double cost_us = 0.0;  // modelled, in microseconds; accepted candidates only
  std::string reason;    // refusals only

  static Verdict yes(double cost_us) { return {true, cost_us, {}}; }
  static Verdict no(std::string reason) { return {false, 0.0, std::move(reason)}; }
};

// Records a request, the answer of every candidate, and the choice.
struct Decision {
  struct Answer {
    std::string candidate;
    Verdict verdict;
  };
  std::string subject;  // "rms_norm inference", "linear layers.0.self_attn.q_proj"
  std::vector<Answer> answers;
  std::optional<size_t> chosen;  // index into answers
};

// The lines that `explain` and the debug log show:
//   rms_norm: cuda_vec    no   hidden=1002 is not a multiple of 8
//             cuda_scalar yes  modelled 4.1 us
std::string to_string(const Decision& decision);

// Asks every candidate and picks the cheapest that accepts. A candidate has `name` (a member or accessor result
// convertible to string_view) and `can_handle(request) -> Verdict`. Returns null in `*chosen` terms only through
// decision.chosen: the caller decides whether no candidate is an error. Another candidate at the cost of the cheapest
// is a bug in the list, wherever the two stand in it.
template <typename Candidate, typename Request>
const Candidate* select(std::span<const Candidate* const> candidates, const Request& request, Decision& decision) {
  const Candidate* best = nullptr;
  for (const Candidate* candidate : candidates) {
    Verdict verdict = candidate->can_handle(request);
    if (verdict.accepted && (best == nullptr || verdict.cost_us < decision.answers[*decision.chosen].verdict.cost_us)) {
      best = candidate;
      decision.chosen = decision.answers.size();
    }
    decision.answers.push_back({std::string(candidate->name), std::move(verdict)});
  }
  for (size_t i = 0; best != nullptr && i < decision.answers.size(); ++i) {
    const Decision::Answer &cheapest = decision.answers[*decision.chosen], &other = decision.answers[i];
    EADEM_CHECK(i == *decision.chosen || !other.verdict.accepted || other.verdict.cost_us > cheapest.verdict.cost_us,
                "{}: {} and {} both cost {} us", decision.subject, cheapest.candidate, other.candidate,
                other.verdict.cost_us);
  }
  return best;
}

// The error for a request that nobody takes: Unsupported, listing every refusal.
[[noreturn]] void throw_no_candidate(const Decision& decision);

}  // namespace eadem
