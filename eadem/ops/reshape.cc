// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/reshape.h"

#include <fmt/ranges.h>

namespace eadem::ops {

std::string Reshape::attrs_text() const {
  const std::string trailing = fmt::format("trailing=[{}]", fmt::join(trailing_, ", "));
  return rows_ ? fmt::format("rows={} {}", to_string(*rows_), trailing) : trailing;
}

std::vector<TensorType> Reshape::infer_types(std::span<const TensorType> inputs) const {
  const TensorType& x = inputs[0];
  int64_t have = 1, want = 1;
  for (int axis = 1; axis < x.rank(); ++axis) have *= x.fixed(axis);
  std::vector<Dim> dims = {rows_.value_or(x.dim(0))};
  for (int64_t extent : trailing_) {
    want *= extent;
    dims.emplace_back(extent);
  }
  if (!rows_ && have != want)
    throw InvalidArgument("reshape: 'x' is {}, {} elements a row; expected {} for trailing [{}]", to_string(x), have,
                          want, fmt::join(trailing_, ", "));
  if (have * x.dim(0) != want * dims[0])
    throw InvalidArgument("reshape: 'x' is {}, {} elements; expected {} for [{}, {}]", to_string(x),
                          to_string(have * x.dim(0)), to_string(want * dims[0]), to_string(dims[0]),
                          fmt::join(trailing_, ", "));
  return {TensorType(x.dtype, dims)};
}

// Rows are divided along their first trailing axis (the heads), which stays the slowest of the row in both shapes.
std::vector<Sharding> Reshape::infer_sharding(std::span<const TensorType> inputs) const {
  const Sharding& sharding = inputs[0].sharding;
  if (rows_ && sharding.kind == Sharding::Kind::sharded)
    throw InvalidArgument("reshape: 'x' is {}; only undivided rows can become other rows", to_string(inputs[0]));
  if (sharding.kind == Sharding::Kind::sharded && sharding.axis != 1)
    throw InvalidArgument("reshape: 'x' is {}; only the second dimension can stay divided", to_string(inputs[0]));
  return {sharding};
}

void Reshape::reference(Pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const {
  outputs[0].data = inputs[0].data;  // backward likewise: dy in, dx out
}

}  // namespace eadem::ops
