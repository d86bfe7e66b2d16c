// SPDX-License-Identifier: Apache-2.0
//
// What ops that carry a state from token to token have in common: the sequences of a step, and the slots of their
// states.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

// query_start is [sequences + 1] i32.
void expect_query_start(std::string_view op, const TensorType& query_start);
// state_slots is [sequences] i32, and the state f32 [any number of slots, row …].
void expect_sequence_state(std::string_view op, const TensorType& query_start, const TensorType& slots,
                           const TensorType& state, std::span<const Dim> row);
// Bytes of the states of the step's sequences, read and written.
double state_traffic(const TensorType& slots, const TensorType& state, const SymbolValues& symbols);

// The tokens of a sequence, and the slot of its state; negative: it has none.
struct SequenceRange {
  int64_t begin = 0, end = 0;
  int64_t slot = -1;
};
// `slots` is null where there are no states.
std::vector<SequenceRange> sequences_of(const RefTensor& query_start, const RefTensor* slots);

}  // namespace eadem::ops
