// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/attention_ports.h"

namespace eadem::ops {

using kernels::KvSource;

void expect_sequences(const Op& op, std::span<const TensorType> in, size_t first, KvSource source) {
  const TensorType &query_start = in[first], &kv_length = in[first + 1], &block_table = in[first + 2];
  expect_rank(op.name(), "query_start", query_start, 1);
  expect_dtype(op.name(), "query_start", query_start, kI32);
  expect_rank(op.name(), "kv_length", kv_length, 1);
  expect_dtype(op.name(), "kv_length", kv_length, kI32);
  Dim sequences_plus_one = kv_length.dim(0);
  sequences_plus_one.value += 1;
  expect_dim(op.name(), "query_start", query_start, 0, sequences_plus_one, "one more than 'kv_length'");
  if (source == KvSource::cached) {
    expect_present(op.name(), "block_table", block_table);
    expect_rank(op.name(), "block_table", block_table, 2);
    expect_dtype(op.name(), "block_table", block_table, kI32);
    expect_dim(op.name(), "block_table", block_table, 0, kv_length.dim(0), "sequences of 'kv_length'");
  } else if (!kernels::is_unconnected(block_table)) {
    throw InvalidArgument("{}: 'block_table' is {} but the op was made for direct keys and values", op.name(),
                          to_string(block_table));
  }
}

void expect_keys(const Op& op, size_t port, const TensorType& type, KvSource source, DType like, Dim tokens,
                 int64_t heads, int64_t width, std::string_view because) {
  const std::vector<Port> ports = op.inputs();
  const std::string_view label = ports[port].name;
  if (source == KvSource::direct) {
    const DType allowed[] = {like};
    expect_plain(op.name(), label, type);
    expect_rank(op.name(), label, type, 3);
    expect_dtype(op.name(), label, type, allowed);
    expect_dim(op.name(), label, type, 0, tokens, "tokens of 'q'");
  } else {
    expect_rank(op.name(), label, type, 4);
    expect_dtype(op.name(), label, type, kFloats);
    expect_cache(op.name(), label, type);
  }
  expect_dim(op.name(), label, type, type.rank() - 1, Dim(width), because);
  expect_dim(op.name(), label, type, 1, Dim(heads), "attribute kv_heads");
}

int64_t RefSequence::row(int64_t j, int64_t g, int64_t heads) const {
  if (block_table == nullptr) return (begin + j) * heads + g;
  const int64_t block_size = keys->shape[2];
  const auto block =
      static_cast<int64_t>(block_table->data[static_cast<size_t>(index * block_table->shape[1] + j / block_size)]);
  return (block * heads + g) * block_size + j % block_size;
}

std::vector<RefSequence> reference_sequences(std::span<const RefTensor> in, size_t first, const RefTensor& keys,
                                             KvSource source) {
  const RefTensor &query_start = in[first], &kv_length = in[first + 1];
  std::vector<RefSequence> result;
  for (int64_t s = 0; s < kv_length.shape[0]; ++s) {
    const auto at = static_cast<size_t>(s);
    result.push_back({.begin = static_cast<int64_t>(query_start.data[at]),
                      .end = static_cast<int64_t>(query_start.data[at + 1]),
                      .length = static_cast<int64_t>(kv_length.data[at]),
                      .keys = &keys,
                      .block_table = source == KvSource::cached ? &in[first + 2] : nullptr,
                      .index = s});
  }
  return result;
}

}  // namespace eadem::ops
