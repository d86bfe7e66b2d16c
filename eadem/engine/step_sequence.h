// SPDX-License-Identifier: Apache-2.0
//
// StepSequence: what one step does with one sequence. A scheduler plans a step as a list of these, and an engine runs
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include "eadem/ops/sampling/sample.h"

namespace eadem::engine {

// How one sequence's token is sampled in one step; greedy unless set. Penalties count the sequence's tokens that the
// engine wrote to the cache, and its tokens of this step.
using SamplingInput = kernels::SampleSettings;

// Added to the logit of a token before anything else, for the generated tokens of index [begin, end).
struct TokenBias {
  int32_t token = 0;
  float bias = 0;
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
};
inline constexpr int64_t kMaxBiases = 1024;     // of a sequence
inline constexpr float kNeverSampled = -1e30f;  // as a bias: finite, because a row of logits may hold no infinity

// Changes the logits [vocab] of a row before its token is drawn, where `tokens` are those of the sequence so far,
// prompt included. It must not throw; a row that it makes NaN fails its request alone. The log-probabilities of the row
// are those of the logits that it leaves.
using LogitsProcessor = std::function<void(std::span<const int32_t> tokens, std::span<float> logits)>;

struct StepSequence {
  std::span<const int32_t> tokens;  // new tokens, at least one
  int64_t cached = 0;               // how many tokens of the sequence are in the cache before them
  // Where the sequence is stored. Static cache: its row. Paged cache: the blocks of positions [0, block_size),
  // [block_size, …); entries after the last new token are ignored.
  std::span<const int32_t> blocks;
  // The tables of the cache groups with a window, alike: kNoBlock, or anything, where no token of the step looks.
  std::span<const std::vector<int32_t>> windows = {};
  int32_t state_slot = 0;  // of its states per sequence, where the model has any
  // Where the model has any: a later step may begin behind `cached` tokens again, as if this one had not been.
  bool may_return = false;
  // Before the step the states are copied from a snapshot, that of the first `cached` tokens, or to one, which an
  // earlier sequence of the step may not load. -1: none.
  int32_t load_snapshot = -1;
  int32_t save_snapshot = -1;
  SamplingInput sampling;
  std::span<const TokenBias> biases;  // at most kMaxBiases; those of one token do not overlap
  // Decode: >= 0 is the row of logits of the step before whose sampled token is the only new token. `tokens` has one
  // entry then, which is not looked at.
  int32_t row = -1;
  bool samples = true;  // false: the prompt continues in another step, so there are no logits and no token is sampled
  // How many of the last tokens are proposals of what would be sampled (speculation). The token before the first of
  // them and each of them has a row of logits, from which a token is sampled as if those before it were the sequence's.
  int64_t drafts = 0;
  // What the model takes for the position of each new token, as rotary embeddings do; empty: its place in the sequence.
  // Which tokens it attends to follows from its place alone.
  std::span<const int32_t> positions = {};
  // The hidden state of each new token, [tokens, hidden] in the dtype of the input previous_hidden. Only models that
  // read hidden states besides tokens have it (models::MtpModel).
  std::span<const std::byte> hidden = {};
  // The drawn token proposes one for another model's sequence, whose place is `ahead` tokens further on. It is drawn
  // with the random number of that place.
  int64_t ahead = 0;
  // Words of several tokens: where the sequence ends in all of a word but its last token, that one is not sampled. With
  // `biases`, at most kMaxBiases.
  std::span<const std::vector<int32_t>> bad_words = {};
  // The mask of the tokens that may be sampled, in all rows (kernels/sample.h); empty: every token.
  std::span<const int32_t> allowed = {};
  // Log-probabilities that are wanted: scored[i] is the token behind new token scored_begin + i. Each has a row of
  // logits of its own, before those that are sampled from, and so many likeliest tokens beside it.
  std::span<const int32_t> scored = {};
  int64_t scored_begin = 0;
  int32_t scored_top_logprobs = 0;
  // Called for the row that is sampled from, with `history`, the tokens of the sequence; null: none. Not with drafts.
  // It runs on rank 0 alone, so other ranks do not know the drawn token, and no later step may refer to the row.
  const LogitsProcessor* processor = nullptr;
  std::span<const int32_t> history = {};

  int64_t num_sampled_rows() const { return samples ? 1 + drafts : 0; }
  int64_t num_rows() const { return std::ssize(scored) + num_sampled_rows(); }

  // The blocks that hold its tokens after the step.
  std::span<const int32_t> used_blocks(int64_t block_size) const {
    return blocks.first(static_cast<size_t>((cached + std::ssize(tokens) + block_size - 1) / block_size));
  }
  // Where the token at `place` of the sequence is stored: block * block_size + offset.
  int64_t slot(int64_t place, int64_t block_size) const {
    return blocks[static_cast<size_t>(place / block_size)] * block_size + place % block_size;
  }
};

}  // namespace eadem::engine
