// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/elementwise/softmax.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef Softmax::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> Softmax::infer_types(std::span<const TensorType> in) const {
  if (in[0].rank() < 1) throw InvalidArgument("softmax: 'x' is {}; expected at least 1 dimension", to_string(in[0]));
  expect_dtype(name(), "x", in[0], kF32);
  expect_plain(name(), "x", in[0]);
  return {plain_type(DType::f32, in[0].dims())};
}

std::vector<Sharding> Softmax::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& x = in[0].sharding;
  if (x.kind == Sharding::Kind::partial || x == Sharding::along(in[0].rank() - 1))
    throw InvalidArgument("softmax: 'x' is {}; expected whole rows, neither partial nor divided along the last axis",
                          to_string(in[0]));
  return {x};
}

Cost Softmax::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  const double elements = static_cast<double>(in[0].num_elements(symbols));
  return {(pass == Pass::backward ? 4 : 14) * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

void Softmax::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (out[0].data.empty()) return;
  const size_t n = static_cast<size_t>(in[0].shape.back()), rows = static_cast<size_t>(in[0].shape.num_rows());
  for (size_t r = 0; r < rows; ++r) {
    const double* x = &in[0].data[r * n];  // y in the backward pass
    double* y = &out[0].data[r * n];
    if (pass == Pass::backward) {
      const double* dy = &in[1].data[r * n];
      double dot = 0;
      for (size_t i = 0; i < n; ++i) dot += dy[i] * x[i];
      for (size_t i = 0; i < n; ++i) y[i] = x[i] * (dy[i] - dot);
      continue;
    }
    const double largest = *std::max_element(x, x + n);
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += std::exp(x[i] - largest);
    for (size_t i = 0; i < n; ++i) y[i] = std::exp(x[i] - largest) / sum;
  }
}

std::vector<Workload> Softmax::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "softmax logits"),
                      std::make_shared<Softmax>(),
                      {TensorType(DType::f32, {Symbol::logit_rows, model.vocab})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
