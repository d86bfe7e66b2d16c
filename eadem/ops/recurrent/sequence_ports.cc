// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/recurrent/sequence_ports.h"

#include <algorithm>

namespace eadem::ops {

void expect_query_start(std::string_view op, const TensorType& query_start) {
  expect_rank(op, "query_start", query_start, 1);
  expect_dtype(op, "query_start", query_start, kI32);
}

void expect_sequence_state(std::string_view op, const TensorType& query_start, const TensorType& slots,
                           const TensorType& state, std::span<const Dim> row) {
  expect_rank(op, "state_slots", slots, 1);
  expect_dtype(op, "state_slots", slots, kI32);
  expect_dim(op, "query_start", query_start, 0, slots.dim(0) + 1, "sequences of 'state_slots' + 1");
  expect_rank(op, "state", state, static_cast<int>(row.size()) + 1);
  expect_dtype(op, "state", state, kF32);
  expect_plain(op, "state", state);
  for (size_t i = 0; i < row.size(); ++i)
    expect_dim(op, "state", state, static_cast<int>(i) + 1, row[i], "what a sequence keeps");
}

double state_traffic(const TensorType& slots, const TensorType& state, const SymbolValues& symbols) {
  const int64_t num_slots = std::max<int64_t>(1, state.dim(0).bind(symbols));
  return 2.0 * static_cast<double>(state.size_bytes(symbols) / num_slots * slots.dim(0).bind(symbols));
}

std::vector<SequenceRange> sequences_of(const RefTensor& query_start, const RefTensor* slots) {
  std::vector<SequenceRange> result;
  for (size_t s = 0; s + 1 < query_start.data.size(); ++s)
    result.push_back({static_cast<int64_t>(query_start.data[s]), static_cast<int64_t>(query_start.data[s + 1]),
                      slots == nullptr ? -1 : static_cast<int64_t>(slots->data[s])});
  return result;
}

}  // namespace eadem::ops
