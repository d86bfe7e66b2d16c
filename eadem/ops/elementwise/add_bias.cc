// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/elementwise/add_bias.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef AddBias::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> AddBias::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 2);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_rank(name(), "bias", in[1], 1);
  expect_dtype(name(), "bias", in[1], kFloats);
  expect_plain(name(), "bias", in[1]);
  expect_dim(name(), "bias", in[1], 0, in[0].dim(1), "last dimension of 'x'");
  return {plain_type(in[0].dtype, in[0].dims())};
}

std::vector<Sharding> AddBias::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "x", in[0], "the bias is added once");
  expect_replicated(name(), "bias", in[1], "like 'x'");
  return {Sharding::replicated()};
}

Cost AddBias::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  return {static_cast<double>(out[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
}

void AddBias::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) {
    const RefTensor& dy = in[0];
    const auto width = static_cast<size_t>(dy.shape[1]);
    if (!out[0].data.empty()) out[0].data = dy.data;
    for (size_t i = 0; !out[1].data.empty() && i < dy.data.size(); ++i) out[1].data[i % width] += dy.data[i];
    return;
  }
  const size_t width = in[1].data.size();
  for (size_t i = 0; i < in[0].data.size(); ++i) out[0].data[i] = in[0].data[i] + in[1].data[i % width];
}

std::vector<Workload> AddBias::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model, step, "add_bias"),
           std::make_shared<AddBias>(),
           {TensorType(model.dtype, {Symbol::tokens, model.hidden}), TensorType(model.dtype, {model.hidden})},
           symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
