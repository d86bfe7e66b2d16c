// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/scale_by.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef ScaleBy::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> ScaleBy::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_rank(name(), "factor", in[1], 1);
  expect_dtype(name(), "factor", in[1], kF32);
  expect_dim(name(), "factor", in[1], 0, Dim(1), "one number");
  return {plain_type(in[0].dtype, in[0].dims())};
}

DType ScaleBy::wanted_dtype(std::span<const TensorType> in, int port) const {
  return port == 0 && in[0].dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

std::vector<Sharding> ScaleBy::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "factor", in[1], "every rank scales by it");
  return {in[0].sharding};
}

Cost ScaleBy::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  return {static_cast<double>(out[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
}

void ScaleBy::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool backward = pass == Pass::backward;
  const RefTensor &x = backward ? in[1] : in[0], &factor = backward ? in[0] : in[1];
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = factor.data[0] * x.data[i];
}

std::vector<Workload> ScaleBy::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "scalar of a layer"),
                      std::make_shared<ScaleBy>(),
                      {TensorType(model.dtype, {Symbol::tokens, model.hidden}), TensorType(DType::f32, {1})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
