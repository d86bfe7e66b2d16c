// SPDX-License-Identifier: Apache-2.0
//
// StepSequence: what one step does with one sequence. A scheduler plans a step as a list of these, and an engine runs
// it.
#pragma once

#include <cstdint>
#include <span>

#include "eadem/ops/sample.h"

namespace eadem::engine {

// How one sequence's token is sampled in one step; greedy unless set. Penalties count the sequence's tokens that the
// engine wrote to the cache, and its tokens of this step.
using SamplingInput = kernels::SampleSettings;

struct StepSequence {
  std::span<const int32_t> tokens;  // new tokens, at least one
  int64_t cached = 0;               // how many tokens of the sequence are in the cache before them
  // Where the sequence is stored. Static cache: its row. Paged cache: the blocks of positions [0, block_size),
  // [block_size, …); entries after the last new token are ignored.
  std::span<const int32_t> blocks;
  SamplingInput sampling;
  bool samples = true;  // false: the prompt continues in another step, so there are no logits and no token is sampled
};

}  // namespace eadem::engine
