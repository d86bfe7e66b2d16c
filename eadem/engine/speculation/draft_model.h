// SPDX-License-Identifier: Apache-2.0
//
// DraftModel: proposes what a second, smaller model samples. It has an engine of its own whose contiguous cache has a
// row for each of its sequences; with more requests than rows, the one that was proposed for longest ago loses its row.
//
// It samples as the request does: with its parameters, its seed and its positions. At temperature 0 that is greedy;
// otherwise both models use one random number for a token, and where their distributions are alike, so are most of
// their samples.
#pragma once

#include <memory>
#include <unordered_map>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/speculation/proposer.h"

namespace eadem::engine {

class DraftModel final : public Proposer {
 public:
  // `engine` has a contiguous cache, and, for a model with states per sequence, draft_tokens, else throws Unsupported;
  // `vocab` is the number of tokens of the model that it proposes for, `assumed_cost` as in Proposer.
  DraftModel(std::unique_ptr<InferEngine> engine, int64_t vocab, double assumed_cost);

  void propose(std::span<Proposal> proposals) override;
  int64_t backlog(RequestId id, std::span<const int32_t> tokens) const override;
  double assumed_cost() const override { return assumed_cost_; }
  void end(RequestId id) override { sequences_.erase(id); }

  const InferEngine& engine() const { return *engine_; }

 private:
  struct Sequence {
    int32_t row = 0;                // in the cache
    std::vector<int32_t> tokens;    // of the request, then proposed ones
    int64_t cached = 0;             // how many of them are in the cache
    int64_t returns_to = 0;         // where states per sequence may begin again: behind those of the request
    int64_t used = 0;               // the last call that proposed for it
    std::vector<TokenBias> biases;  // of tokens that this model has
  };
  // A request that this call proposes for.
  struct Active {
    Sequence* sequence;
    Proposal* proposal;
    int64_t depth;
  };

  int64_t usable(const Sequence& sequence, std::span<const int32_t> tokens) const;
  bool prepare(Proposal& proposal);
  Sequence* sequence_of(const Proposal& proposal);
  void step();
  bool take(Active& active, int32_t token) const;

  std::unique_ptr<InferEngine> engine_;
  int64_t vocab_;
  double assumed_cost_;
  bool has_states_;  // per sequence
  std::unordered_map<RequestId, Sequence> sequences_;
  int64_t calls_ = 0;
  std::vector<Active> active_;
  std::vector<StepSequence> plan_;  // of a step
};

}  // namespace eadem::engine
