// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/scale_by_position.h"

#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

ScaleByPosition::ScaleByPosition(const kernels::ScaleByPositionAttrs& attrs) : attrs_(attrs) {
  if (!std::isfinite(attrs.rate))
    throw InvalidArgument("scale_by_position: rate is {}; expected a finite number", attrs.rate);
  if (attrs.length <= 0)
    throw InvalidArgument("scale_by_position: length is {}; expected a positive number", attrs.length);
}

std::string ScaleByPosition::attrs_text() const {
  return fmt::format("rate={} length={}{}", attrs_.rate, attrs_.length, attrs_.plus_one ? " plus_one" : "");
}

std::vector<TensorType> ScaleByPosition::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 3);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_rank(name(), "positions", in[1], 1);
  expect_dtype(name(), "positions", in[1], kI32);
  expect_dim(name(), "positions", in[1], 0, in[0].dim(0), "tokens of 'x'");
  return {plain_type(in[0].dtype, in[0].dims())};
}

std::vector<Sharding> ScaleByPosition::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "positions", in[1], "every rank scales every token");
  const Sharding& x = in[0].sharding;
  if (!(x == Sharding::replicated()) && !(x == Sharding::along(1)))
    throw InvalidArgument("scale_by_position: 'x' is {}; expected replicated or sharded(1), its heads",
                          to_string(in[0]));
  return {x};
}

Cost ScaleByPosition::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                           const SymbolValues& symbols) const {
  // A logarithm of a token counts as 20.
  const double elements = static_cast<double>(out[0].num_elements(symbols)),
               tokens = static_cast<double>(out[0].bind(symbols)[0]);
  return {elements + 20 * tokens, traffic_bytes(*this, pass, in, out, symbols)};
}

void ScaleByPosition::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool backward = pass == Pass::backward;
  const RefTensor &x = backward ? in[1] : in[0], &positions = backward ? in[0] : in[1];
  for (size_t i = 0; i < out[0].data.size(); ++i) {
    const size_t token = i / (x.data.size() / positions.data.size());
    out[0].data[i] = attrs_.factor(static_cast<int64_t>(positions.data[token])) * x.data[i];
  }
}

std::vector<Workload> ScaleByPosition::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "scale q by position"),
                      std::make_shared<ScaleByPosition>(kernels::ScaleByPositionAttrs{}),
                      {TensorType(model.dtype, {Symbol::tokens, model.heads, model.head_dim}),
                       TensorType(DType::i32, {Symbol::tokens})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
