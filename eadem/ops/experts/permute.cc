// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/permute.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

const kernels::NoAttrs kNoPermuteAttrs;

void expect_rows_port(std::string_view op, const TensorType& rows) {
  expect_rank(op, "rows", rows, 2);
  expect_dtype(op, "rows", rows, kI32);
}

}  // namespace

// ---- Permute

AttrsRef Permute::attrs() const { return AttrsRef(kNoPermuteAttrs); }

std::vector<TensorType> Permute::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 2);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_rows_port(name(), in[1]);
  expect_dim(name(), "rows", in[1], 0, in[0].dim(0), "tokens of 'x'");
  return {TensorType(in[0].dtype, {in[1].fixed(1) * in[0].dim(0), in[0].dim(1)})};
}

Cost Permute::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  const double additions = pass == Pass::backward ? static_cast<double>(out[0].num_elements(symbols)) : 0;
  return {additions, traffic_bytes(*this, pass, in, out, symbols)};
}

void Permute::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool backward = pass == Pass::backward;
  const RefTensor &rows = in[backward ? 0 : 1], &from = in[backward ? 1 : 0];
  const auto top_k = static_cast<size_t>(rows.shape[1]), hidden = static_cast<size_t>(from.shape[1]);
  for (double& value : out[0].data) value = 0;
  for (size_t pair = 0; pair < rows.data.size() && !out[0].data.empty(); ++pair) {
    const size_t token = pair / top_k, row = static_cast<size_t>(rows.data[pair]);
    for (size_t h = 0; h < hidden; ++h)
      if (backward)
        out[0].data[token * hidden + h] += from.data[row * hidden + h];
      else
        out[0].data[row * hidden + h] = from.data[token * hidden + h];
  }
}

std::vector<Workload> Permute::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "permute"),
                      std::make_shared<Permute>(),
                      {TensorType(model.dtype, {Symbol::tokens, model.hidden}),
                       TensorType(DType::i32, {Symbol::tokens, model.top_k})},
                      symbols_of(step)});
  return rows;
}

// ---- Unpermute

AttrsRef Unpermute::attrs() const { return AttrsRef(kNoPermuteAttrs); }

std::vector<TensorType> Unpermute::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[kX], 2);
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  expect_rows_port(name(), in[kRows]);
  expect_rank(name(), "weights", in[kWeights], 2);
  expect_dtype(name(), "weights", in[kWeights], kF32);
  expect_plain(name(), "weights", in[kWeights]);
  expect_same_dims(name(), "weights", in[kWeights], in[kRows], "rows");
  expect_dim(name(), "x", in[kX], 0, in[kRows].fixed(1) * in[kRows].dim(0), "one row for each of 'rows'");
  return {TensorType(in[kX].dtype, {in[kRows].dim(0), in[kX].dim(1)})};
}

std::vector<Sharding> Unpermute::infer_sharding(std::span<const TensorType> in) const {
  for (int port : {kX, kWeights})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "the gradient of a weight needs whole rows");
  return {Sharding::replicated()};
}

Cost Unpermute::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  const double products = static_cast<double>(in[kX].num_elements(symbols));
  return {(pass == Pass::backward ? 3 : 2) * products, traffic_bytes(*this, pass, in, out, symbols)};
}

void Unpermute::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &rows = in[kRows], &weights = in[kWeights];
  const auto top_k = static_cast<size_t>(rows.shape[1]), hidden = static_cast<size_t>(x.shape[1]);
  const bool backward = pass == Pass::backward;
  if (!backward)
    for (double& value : out[0].data) value = 0;
  for (size_t pair = 0; pair < rows.data.size(); ++pair) {
    const size_t token = pair / top_k, row = static_cast<size_t>(rows.data[pair]);
    double dot = 0;
    for (size_t h = 0; h < hidden; ++h) {
      const double value = x.data[row * hidden + h];
      if (!backward) {
        out[0].data[token * hidden + h] += weights.data[pair] * value;
        continue;
      }
      const double dy = in[3].data[token * hidden + h];
      dot += dy * value;
      if (!out[0].data.empty()) out[0].data[row * hidden + h] = weights.data[pair] * dy;
    }
    if (backward && !out[1].data.empty()) out[1].data[pair] = dot;
  }
}

std::vector<Workload> Unpermute::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "unpermute"),
                      std::make_shared<Unpermute>(),
                      {TensorType(model.dtype, {model.top_k * Dim(Symbol::tokens), model.hidden}),
                       TensorType(DType::i32, {Symbol::tokens, model.top_k}),
                       TensorType(DType::f32, {Symbol::tokens, model.top_k})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
