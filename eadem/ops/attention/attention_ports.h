// SPDX-License-Identifier: Apache-2.0
//
// What the ops of attention have in common: the ports that describe sequences, and where a key lies.
#pragma once

#include "eadem/kernels/attention/attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

// The ports from `first` on: query_start, kv_length and block_table of kernels/attention/attention.h. For type rules.
void expect_sequences(const Op& op, std::span<const TensorType> inputs, size_t first, kernels::KvSource source);

// Keys or values [tokens, heads, width] of the step (direct) or [blocks, heads, block_size, width] of a cache. For type
// rules; `like` is the dtype of direct ones, and `because` the attribute that says `width`.
void expect_keys(const Op& op, size_t port, const TensorType& type, kernels::KvSource source, DType like, Dim tokens,
                 int64_t heads, int64_t width, std::string_view because);

// One sequence of a reference's step.
struct RefSequence {
  int64_t begin, end, length;  // its tokens of the step, and its keys
  const RefTensor *keys, *block_table;
  int64_t index;

  int64_t position(int64_t token) const { return length - (end - begin) + token - begin; }
  // The row of position j of head g of `heads`, of keys and values alike.
  int64_t row(int64_t j, int64_t g, int64_t heads) const;
};
// `first` as above; block_table is read if `source` is cached.
std::vector<RefSequence> reference_sequences(std::span<const RefTensor> inputs, size_t first, const RefTensor& keys,
                                             kernels::KvSource source);

}  // namespace eadem::ops
