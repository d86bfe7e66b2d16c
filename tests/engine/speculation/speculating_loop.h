// SPDX-License-Identifier: Apache-2.0
//
// Requests on an engine, with tokens proposed that are known to be right or wrong.
#pragma once

#include <functional>
#include <map>

#include "tests/engine/engine_helpers.h"

namespace eadem::engine {

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
};

struct SpeculatingRun {
  std::vector<Answer> answers;  // of the requests, in their order
  int64_t proposed = 0, accepted = 0, steps = 0;
};

// Returns what is proposed for a request of which `done` tokens are sampled.
using Propose = std::function<std::vector<int32_t>(size_t request, int64_t done)>;

// Runs requests side by side, beginning with an empty cache.
inline SpeculatingRun run_requests(InferEngine& engine, const std::vector<GenerationRequest>& requests,
                                   const Propose& propose = {}) {
  engine.reset_cache();
  Scheduler scheduler(engine.limits());
  SpeculatingRun run;
  run.answers.resize(requests.size());
  std::map<RequestId, size_t> index;
  for (const GenerationRequest& request : requests) {
    const size_t next = index.size();
    index[scheduler.add(request)] = next;
  }
  while (!scheduler.is_idle()) {
    std::vector<std::pair<RequestId, std::vector<int32_t>>> proposals;
    if (propose)
      for (const Draftable& each : scheduler.draftable()) {
        const size_t request = index.at(each.id);
        proposals.emplace_back(each.id, propose(request, std::ssize(run.answers[request].tokens)));
      }
    for (const auto& [id, drafts] : proposals) scheduler.propose(id, drafts);
    const InferEngine::Output& output = engine.forward(scheduler.plan(engine.cache_contents()));
    ++run.steps;
    for (const StepEvent& event : scheduler.commit(output.output_ids, output.logprobs)) {
      if (!event.sampled) continue;
      run.answers[index.at(event.id)].tokens.push_back(event.token);
      run.answers[index.at(event.id)].logprobs.push_back(event.logprob);
    }
  }
  run.proposed = scheduler.proposed_tokens();
  run.accepted = scheduler.accepted_tokens();
  return run;
}

// Proposes up to `most` tokens of known answers. Every third proposal has a wrong token, `wrong`, somewhere.
inline Propose from_answers(const std::vector<Answer>& answers, int64_t most, int32_t wrong) {
  return [&answers, most, wrong, count = int64_t{0}](size_t request, int64_t done) mutable {
    const std::vector<int32_t>& tokens = answers[request].tokens;
    const int64_t depth = std::min(most - count++ % 2, std::ssize(tokens) - done);
    std::vector<int32_t> drafts(tokens.begin() + done, tokens.begin() + done + depth);
    if (count % 3 == 0 && depth > 0) drafts[static_cast<size_t>(count / 3 % depth)] = wrong;
    return drafts;
  };
}

inline void expect_same_answers(const SpeculatingRun& a, const SpeculatingRun& b, const std::string& what) {
  ASSERT_EQ(a.answers.size(), b.answers.size());
  for (size_t i = 0; i < a.answers.size(); ++i) {
    EXPECT_EQ(a.answers[i].tokens, b.answers[i].tokens) << what << ", request " << i;
    expect_same_bits(a.answers[i].logprobs, b.answers[i].logprobs, what + ", request " + std::to_string(i));
  }
}

}  // namespace eadem::engine
