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
  std::string reason;    // of a refusal; of an acceptance, where its cost comes from, or empty

  static Verdict yes(double cost_us, std::string reason = {}) { return {true, cost_us, std::move(reason)}; }
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
// A reason to accept follows the cost in parentheses. "(chosen; first of equals)" marks a choice by the order of the
// list.
std::string to_string(const Decision& decision);

// Asks every candidate and picks the cheapest that accepts, of equals the first in the list. A candidate has `name` (a
// member convertible to string_view) and `can_handle(request) -> Verdict`. Returns null if nobody accepts: the caller
// decides whether that is an error.
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
  return best;
}

// The error for a request that nobody takes: Unsupported, listing every refusal.
[[noreturn]] void throw_no_candidate(const Decision& decision);

}  // namespace eadem
