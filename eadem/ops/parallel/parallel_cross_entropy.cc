// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/parallel/parallel_cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

constexpr auto kStateWords = static_cast<size_t>(kernels::kSoftmaxStateWords);

void expect_part_and_labels(std::string_view op, std::span<const TensorType> in) {
  expect_rank(op, "logits", in[0], 2);
  expect_dtype(op, "logits", in[0], kF32);
  expect_plain(op, "logits", in[0]);
  expect_rank(op, "labels", in[1], 1);
  expect_dtype(op, "labels", in[1], kI32);
  expect_dim(op, "labels", in[1], 0, in[0].dim(0), "rows of 'logits'");
}

void expect_divided_vocabulary(std::string_view op, std::span<const TensorType> in) {
  if (!(in[0].sharding == Sharding::along(1)))
    throw InvalidArgument("{}: 'logits' is {}; expected sharded(1)", op, to_string(in[0]));
  expect_replicated(op, "labels", in[1], "every rank sees every row");
}

// The state that a rank computes for a row: {m, l, z}.
void softmax_state(double* state, std::span<const double> logits, int64_t label) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double logit : logits) sum += std::exp(logit - most);
  state[0] = most;
  state[1] = sum;
  state[2] = label >= 0 && label < static_cast<int64_t>(logits.size()) ? logits[static_cast<size_t>(label)] : 0;
}

}  // namespace

// --- softmax_state

std::vector<TensorType> SoftmaxState::infer_types(std::span<const TensorType> in) const {
  expect_part_and_labels(name(), in);
  return {TensorType(DType::f32, {in[0].dim(0), kernels::kSoftmaxStateWords})};
}

DType SoftmaxState::wanted_dtype(std::span<const TensorType> in, int port) const {
  return port == 0 ? DType::f32 : in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> SoftmaxState::infer_sharding(std::span<const TensorType> in) const {
  expect_divided_vocabulary(name(), in);
  return {Sharding::along(1)};
}

Cost SoftmaxState::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                        const SymbolValues& symbols) const {
  return {13 * static_cast<double>(in[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
}

void SoftmaxState::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto rows = static_cast<size_t>(in[0].shape[0]), part = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    const auto label = static_cast<int64_t>(in[1].data[r]);
    softmax_state(&out[0].data[r * kStateWords], {&in[0].data[r * part], part}, label < 0 ? -1 : label - part_.first);
  }
}

// As on the first of two ranks.
std::vector<Workload> SoftmaxState::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model, step, "softmax_state"),
           std::make_shared<SoftmaxState>(kernels::VocabularyPart{}),
           {TensorType(DType::f32, {Symbol::tokens, model.vocab / 2}), TensorType(DType::i32, {Symbol::tokens})},
           symbols_of(step)});
  return rows;
}

// --- parallel_cross_entropy

std::vector<TensorType> ParallelCrossEntropy::infer_types(std::span<const TensorType> in) const {
  expect_part_and_labels(name(), in);
  expect_rank(name(), "states", in[2], 2);
  expect_dtype(name(), "states", in[2], kF32);
  expect_dim(name(), "states", in[2], 0, in[0].dim(0), "rows of 'logits'");
  expect_dim(name(), "states", in[2], 1, Dim(ranks_ * kernels::kSoftmaxStateWords), "m, l and z of each rank");
  return {TensorType(DType::f32, {in[0].dim(0)})};
}

DType ParallelCrossEntropy::wanted_dtype(std::span<const TensorType> in, int port) const {
  return port == 1 ? in[1].dtype : DType::f32;
}

Sharding ParallelCrossEntropy::wanted_sharding(std::span<const TensorType> in, int port) const {
  return port == 2 ? Sharding::replicated() : Op::wanted_sharding(in, port);
}

std::vector<Sharding> ParallelCrossEntropy::infer_sharding(std::span<const TensorType> in) const {
  expect_divided_vocabulary(name(), in);
  expect_replicated(name(), "states", in[2], "every rank needs those of all");
  return {Sharding::replicated()};
}

std::vector<TensorType> ParallelCrossEntropy::extra_types(std::span<const TensorType> in) const {
  return {TensorType(DType::f32, {in[0].dim(0)})};
}

Cost ParallelCrossEntropy::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                                const SymbolValues& symbols) const {
  if (pass == Pass::backward)
    return {7 * static_cast<double>(in[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
  // The forward pass reads the states of all ranks and not the logits.
  return {7 * static_cast<double>(in[2].num_elements(symbols)),
          traffic_bytes(in.subspan(1), out, symbols) + traffic_bytes({}, extra_types(in), symbols)};
}

void ParallelCrossEntropy::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto rows = static_cast<size_t>(in[0].shape[0]), part = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    const auto label = static_cast<int64_t>(in[1].data[r]);
    if (pass == Pass::backward) {
      if (out[0].data.empty()) return;
      const double lse = in[2].data[r], dloss = in[3].data[r];
      for (size_t i = 0; i < part; ++i) {
        const double target = static_cast<int64_t>(i) == label - part_.first ? 1 : 0;
        out[0].data[r * part + i] = label < 0 ? 0 : dloss * (std::exp(in[0].data[r * part + i] - lse) - target);
      }
      continue;
    }
    const auto ranks = static_cast<size_t>(ranks_);
    const auto word = [&](size_t rank, size_t i) { return in[2].data[(r * ranks + rank) * kStateWords + i]; };
    double most = word(0, 0), sum = 0, target = 0;
    for (size_t rank = 1; rank < ranks; ++rank) most = std::max(most, word(rank, 0));
    for (size_t rank = 0; rank < ranks; ++rank) {
      sum += word(rank, 1) * std::exp(word(rank, 0) - most);
      target += word(rank, 2);
    }
    const double lse = most + std::log(sum);
    out[0].data[r] = label < 0 ? 0 : lse - target;
    if (pass == Pass::forward && !out[1].data.empty()) out[1].data[r] = lse;
  }
}

// As on the first of two ranks.
std::vector<Workload> ParallelCrossEntropy::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model, step, "parallel_cross_entropy"),
           std::make_shared<ParallelCrossEntropy>(kernels::VocabularyPart{}, 2),
           {TensorType(DType::f32, {Symbol::tokens, model.vocab / 2}), TensorType(DType::i32, {Symbol::tokens}),
            TensorType(DType::f32, {Symbol::tokens, 2 * kernels::kSoftmaxStateWords})},
           symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
