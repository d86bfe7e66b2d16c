// SPDX-License-Identifier: Apache-2.0
//
// PromptLookup: proposes what followed the last tokens of a request when they stood in its prompt or answer before.
//
// Of the places where 4, 3 or 2 last tokens stood, that with the most of them counts, and of equals the last one. What
// follows it is proposed, and where that reaches the end of the request's tokens, what was proposed: a text that goes
// round is continued as far as is wanted.
// Source: Saxena 2023, "Prompt lookup decoding".
#pragma once

#include "eadem/engine/speculation/proposer.h"

namespace eadem::engine {

// Fills `drafts` with what is proposed behind `tokens`: `depth` tokens, or none.
void look_up(std::vector<int32_t>& drafts, std::span<const int32_t> tokens, int64_t depth);

class PromptLookup final : public Proposer {
 public:
  void propose(std::span<Proposal> proposals) override;
};

}  // namespace eadem::engine
