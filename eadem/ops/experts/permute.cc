// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/permute.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

enum PairPort { kPairX, kPairRows, kPairWeights };

std::vector<Port> expert_row_ports(bool weighted) {
  std::vector<Port> ports = {{"x"}, {"rows", Port::Role::index}};
  if (weighted) ports.push_back({"weights"});
  return ports;
}

// Gradients of weights need what they multiplied; without weights the rows are all that backward asks for.
std::vector<Saved> saved_rows(bool weighted) {
  using enum Saved::Kind;
  if (!weighted) return {{input, kPairRows}};
  return {{input, kPairX}, {input, kPairRows}, {input, kPairWeights}};
}

void expect_row_ports(std::string_view op, std::span<const TensorType> in, bool weighted) {
  expect_rank(op, "x", in[kPairX], 2);
  expect_dtype(op, "x", in[kPairX], kActivations);
  expect_plain(op, "x", in[kPairX]);
  expect_rank(op, "rows", in[kPairRows], 2);
  expect_dtype(op, "rows", in[kPairRows], kI32);
  if (!weighted) return;
  expect_rank(op, "weights", in[kPairWeights], 2);
  expect_dtype(op, "weights", in[kPairWeights], kF32);
  expect_plain(op, "weights", in[kPairWeights]);
  expect_same_dims(op, "weights", in[kPairWeights], in[kPairRows], "rows");
}

void expect_whole_rows(std::string_view op, std::span<const TensorType> in, bool weighted) {
  expect_replicated(op, "x", in[kPairX],
                    weighted ? "the gradient of a weight needs whole rows" : "every rank adds up whole rows");
  if (weighted) expect_replicated(op, "weights", in[kPairWeights], "the gradient of a weight needs whole rows");
}

// A pair of a token and one of its experts is a row of either side. What a pass reads, and where it finds it.
struct PairTensors {
  const RefTensor &rows, &from;
  const RefTensor *x, *weights;  // null: not weighted
  size_t top_k, hidden;

  PairTensors(std::span<const RefTensor> in, bool backward, bool weighted)
      : rows(in[backward && !weighted ? 0 : kPairRows]),
        from(backward ? in.back() : in[kPairX]),
        x(weighted ? &in[kPairX] : nullptr),
        weights(weighted ? &in[kPairWeights] : nullptr),
        top_k(static_cast<size_t>(rows.shape[1])),
        hidden(static_cast<size_t>(from.shape[1])) {}
  double weight(size_t pair) const { return weights == nullptr ? 1 : weights->data[pair]; }
};

// to[row of the pair] = weight * from[its token]
void spread_pairs(std::vector<double>& to, const PairTensors& t) {
  for (size_t pair = 0; pair < t.rows.data.size() && !to.empty(); ++pair)
    for (size_t h = 0; h < t.hidden; ++h)
      to[static_cast<size_t>(t.rows.data[pair]) * t.hidden + h] =
          t.weight(pair) * t.from.data[pair / t.top_k * t.hidden + h];
}

// to[token] = sum of weight * from[row of the pair] over its pairs
void gather_pairs(std::vector<double>& to, const PairTensors& t) {
  std::fill(to.begin(), to.end(), 0.0);
  for (size_t pair = 0; pair < t.rows.data.size() && !to.empty(); ++pair)
    for (size_t h = 0; h < t.hidden; ++h)
      to[pair / t.top_k * t.hidden + h] +=
          t.weight(pair) * t.from.data[static_cast<size_t>(t.rows.data[pair]) * t.hidden + h];
}

// to[pair] = by_token[its token] . by_row[its row]
void pair_products(std::vector<double>& to, const RefTensor& by_token, const RefTensor& by_row, const PairTensors& t) {
  for (size_t pair = 0; pair < to.size(); ++pair) {
    const size_t token = pair / t.top_k * t.hidden, row = static_cast<size_t>(t.rows.data[pair]) * t.hidden;
    to[pair] = 0;
    for (size_t h = 0; h < t.hidden; ++h) to[pair] += by_token.data[token + h] * by_row.data[row + h];
  }
}

}  // namespace

// ---- Permute

std::vector<Port> Permute::inputs() const { return expert_row_ports(attrs_.weighted); }
std::vector<Saved> Permute::saved() const { return saved_rows(attrs_.weighted); }

std::vector<TensorType> Permute::infer_types(std::span<const TensorType> in) const {
  expect_row_ports(name(), in, attrs_.weighted);
  expect_dim(name(), "rows", in[kPairRows], 0, in[kPairX].dim(0), "tokens of 'x'");
  return {TensorType(in[kPairX].dtype, {in[kPairRows].fixed(1) * in[kPairX].dim(0), in[kPairX].dim(1)})};
}

std::vector<Sharding> Permute::infer_sharding(std::span<const TensorType> in) const {
  if (!attrs_.weighted) return Op::infer_sharding(in);
  expect_whole_rows(name(), in, attrs_.weighted);
  return {Sharding::replicated()};
}

Cost Permute::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  const double copies =
      static_cast<double>(in[kPairRows].fixed(1)) * static_cast<double>(in[kPairX].num_elements(symbols));
  const bool backward = pass == Pass::backward;
  const double operations = attrs_.weighted ? (backward ? 4 : 1) : backward ? 1 : 0;
  return {operations * copies, traffic_bytes(*this, pass, in, out, symbols)};
}

void Permute::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const PairTensors tensors(in, pass == Pass::backward, attrs_.weighted);
  if (pass != Pass::backward) return spread_pairs(out[0].data, tensors);
  gather_pairs(out[0].data, tensors);
  if (attrs_.weighted) pair_products(out[1].data, *tensors.x, tensors.from, tensors);
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
  for (const StepShape& step : step_shapes())
    rows.push_back({workload_name("llama-4-scout", step, "permute with weights"),
                    std::make_shared<Permute>(kernels::PermuteAttrs{.weighted = true}),
                    {TensorType(DType::bf16, {Symbol::tokens, 5120}), TensorType(DType::i32, {Symbol::tokens, 1}),
                     TensorType(DType::f32, {Symbol::tokens, 1})},
                    symbols_of(step)});
  return rows;
}

// ---- Unpermute

std::vector<Port> Unpermute::inputs() const { return expert_row_ports(attrs_.weighted); }
std::vector<Saved> Unpermute::saved() const { return saved_rows(attrs_.weighted); }

std::vector<TensorType> Unpermute::infer_types(std::span<const TensorType> in) const {
  expect_row_ports(name(), in, attrs_.weighted);
  expect_dim(name(), "x", in[kPairX], 0, in[kPairRows].fixed(1) * in[kPairRows].dim(0), "one row for each of 'rows'");
  return {TensorType(in[kPairX].dtype, {in[kPairRows].dim(0), in[kPairX].dim(1)})};
}

std::vector<Sharding> Unpermute::infer_sharding(std::span<const TensorType> in) const {
  expect_whole_rows(name(), in, attrs_.weighted);
  return {Sharding::replicated()};
}

Cost Unpermute::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  const double products = static_cast<double>(in[kPairX].num_elements(symbols));
  const bool backward = pass == Pass::backward;
  const double operations = attrs_.weighted ? (backward ? 3 : 2) : backward ? 0 : 1;
  return {operations * products, traffic_bytes(*this, pass, in, out, symbols)};
}

void Unpermute::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const PairTensors tensors(in, pass == Pass::backward, attrs_.weighted);
  if (pass != Pass::backward) return gather_pairs(out[0].data, tensors);
  spread_pairs(out[0].data, tensors);
  if (attrs_.weighted) pair_products(out[1].data, tensors.from, *tensors.x, tensors);
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
  for (const StepShape& step : step_shapes())
    rows.push_back({workload_name("llama-4-scout", step, "unpermute without weights"),
                    std::make_shared<Unpermute>(kernels::UnpermuteAttrs{.weighted = false}),
                    {TensorType(DType::bf16, {Symbol::tokens, 5120}), TensorType(DType::i32, {Symbol::tokens, 1})},
                    symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
