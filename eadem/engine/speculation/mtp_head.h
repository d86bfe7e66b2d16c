// SPDX-License-Identifier: Apache-2.0
//
// MtpHead: proposes what the model's own head for multi-token prediction samples (models/mtp_model.h). The head has an
// engine of its own, whose contiguous cache has a row for each of its sequences.
//
// It reads pairs: the hidden state of the model at a position, and the token behind it. Hidden states are kept from the
// steps that compute them until the head reads them, which is when tokens are first wanted of it. The first token that
// it proposes comes from the last pair; for each further one it reads its own hidden state with the token that it
// proposed. Those pairs are read again, with the model's hidden states, when the tokens were accepted.
//
// A sequence may begin anywhere: what the head has not seen, it does not attend to, and proposes less well. It has not
// seen
//   positions that the request found in the cache, whose hidden states nobody computed,
//   all but the last kMostWaiting positions, at least, of those that wait to be read,
//   what was there before its row of the cache was full, or went to another request.
//
// It samples as the request does: with its parameters, seed and positions. Penalties count what the head has seen.
#pragma once

#include <memory>
#include <unordered_map>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/speculation/proposer.h"

namespace eadem::engine {

class MtpHead final : public Proposer {
 public:
  static constexpr int64_t kMostWaiting = 1024;

  // `engine` has a models::MtpModel and a contiguous cache; `assumed_cost` as in Proposer. Throws Unsupported unless
  // the head reads hidden states of the dtype of those of `model`.
  MtpHead(std::unique_ptr<InferEngine> engine, const InferEngine& model, double assumed_cost);

  void see(std::span<const RequestId> ids, std::span<const StepSequence> plan, const InferEngine& engine) override;
  void propose(std::span<Proposal> proposals) override;
  int64_t backlog(RequestId id, std::span<const int32_t> tokens) const override;
  double assumed_cost() const override { return assumed_cost_; }
  void end(RequestId id) override { sequences_.erase(id); }

  const InferEngine& engine() const { return *engine_; }

 private:
  // Pair i is the hidden state of position i and token i + 1.
  struct Sequence {
    int32_t row = -1;               // in the cache; -1: none
    int64_t first = 0;              // the pair at place 0 of the row
    int64_t next = 0;               // the first pair that is not in the row
    std::vector<std::byte> states;  // hidden states of pairs next, next + 1, …
    int64_t used = 0;               // the last call that proposed for it
    std::vector<int32_t> tokens;    // of the request, then proposed ones
    std::vector<int32_t> positions;

    void begin_again() { first = next; }
  };
  // A request that this call proposes for.
  struct Active {
    Sequence* sequence;
    Proposal* proposal;
    int64_t depth;
    int64_t read;  // the first pair that this call has not read
  };

  int64_t num_waiting(const Sequence& sequence) const { return std::ssize(sequence.states) / row_bytes_; }
  static void forget_first(Sequence& sequence, int64_t count, int64_t row_bytes);
  void see(Sequence& sequence, int64_t begin, std::span<const std::byte> states);
  void prepare(Proposal& proposal);
  bool take_row(Sequence& sequence);
  void step();
  static bool take(Active& active, int32_t token);

  std::unique_ptr<InferEngine> engine_;
  double assumed_cost_;
  int64_t row_bytes_;  // of a hidden state
  std::unordered_map<RequestId, Sequence> sequences_;
  int64_t calls_ = 0;
  std::vector<Active> active_;
  std::vector<StepSequence> plan_;  // of a step
};

}  // namespace eadem::engine
