// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/streams/mix_streams.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

constexpr kernels::NoAttrs kNoStreamAttrs;

struct StreamShape {
  const char* model;
  int64_t streams, hidden;
  DType dtype;

  // Of the weights of a token.
  int64_t width() const { return kernels::StreamWeightsAttrs{.streams = streams}.width(); }
};
constexpr StreamShape kStreamShapes[] = {{"tiny", 3, 64, DType::f32}, {"deepseek-v4", 4, 4096, DType::bf16}};

// x [tokens, streams, hidden] and weights [tokens, width].
void expect_streams(const Op& op, const TensorType& x, const TensorType& weights) {
  expect_rank(op.name(), "x", x, 3);
  expect_dtype(op.name(), "x", x, kActivations);
  expect_plain(op.name(), "x", x);
  expect_rank(op.name(), "weights", weights, 2);
  expect_dtype(op.name(), "weights", weights, kF32);
  expect_plain(op.name(), "weights", weights);
  expect_dim(op.name(), "weights", weights, 0, x.dim(0), "tokens of 'x'");
}

DType wanted_of(std::span<const TensorType> in, int port, int weights) {
  if (port == weights) return DType::f32;
  return in[0].dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

std::vector<Sharding> expect_whole_streams(const Op& op, std::span<const TensorType> in) {
  for (size_t port = 0; port < in.size(); ++port)
    expect_replicated(op.name(), op.inputs()[port].name, in[port], "every rank has every stream");
  return {Sharding::replicated()};
}

}  // namespace

AttrsRef CollapseStreams::attrs() const { return AttrsRef(kNoStreamAttrs); }
AttrsRef ExpandStreams::attrs() const { return AttrsRef(kNoStreamAttrs); }

std::vector<TensorType> CollapseStreams::infer_types(std::span<const TensorType> in) const {
  expect_streams(*this, in[kX], in[kWeights]);
  if (in[kWeights].fixed(1) < in[kX].fixed(1))
    throw InvalidArgument("collapse_streams: 'weights' is {}; expected a weight for each stream of 'x' {}",
                          to_string(in[kWeights]), to_string(in[kX]));
  return {TensorType(in[kX].dtype, {in[kX].dim(0), in[kX].dim(2)})};
}

DType CollapseStreams::wanted_dtype(std::span<const TensorType> in, int port) const {
  return wanted_of(in, port, kWeights);
}

std::vector<Sharding> CollapseStreams::infer_sharding(std::span<const TensorType> in) const {
  return expect_whole_streams(*this, in);
}

Cost CollapseStreams::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                           const SymbolValues& symbols) const {
  return {(pass == Pass::backward ? 3 : 2) * static_cast<double>(in[kX].num_elements(symbols)),
          traffic_bytes(*this, pass, in, out, symbols)};
}

void CollapseStreams::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto n = static_cast<size_t>(in[kX].shape[1]), hidden = static_cast<size_t>(in[kX].shape[2]),
             width = static_cast<size_t>(in[kWeights].shape[1]);
  const bool backward = pass == Pass::backward;
  for (RefTensor& tensor : out)
    if (!backward || &tensor != &out[0]) std::fill(tensor.data.begin(), tensor.data.end(), 0.0);
  for (size_t t = 0; t < static_cast<size_t>(in[kX].shape[0]); ++t)
    for (size_t i = 0; i < n; ++i)
      for (size_t d = 0; d < hidden; ++d) {
        const size_t at = (t * n + i) * hidden + d, weight = t * width + i;
        if (!backward) {
          out[0].data[t * hidden + d] += in[kWeights].data[weight] * in[kX].data[at];
          continue;
        }
        const double dy = in[2].data[t * hidden + d];
        if (!out[0].data.empty()) out[0].data[at] = in[kWeights].data[weight] * dy;
        if (!out[1].data.empty()) out[1].data[weight] += in[kX].data[at] * dy;
      }
}

std::vector<Workload> CollapseStreams::workloads() {
  std::vector<Workload> rows;
  for (const StreamShape& shape : kStreamShapes)
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(shape.model, step, "collapse_streams"),
                      std::make_shared<CollapseStreams>(),
                      {TensorType(shape.dtype, {Symbol::tokens, shape.streams, shape.hidden}),
                       TensorType(DType::f32, {Symbol::tokens, shape.width()})},
                      symbols_of(step)});
  return rows;
}

std::vector<TensorType> ExpandStreams::infer_types(std::span<const TensorType> in) const {
  expect_streams(*this, in[kX], in[kWeights]);
  const DType like_x[] = {in[kX].dtype};
  expect_rank(name(), "y", in[kY], 2);
  expect_dtype(name(), "y", in[kY], like_x);
  expect_plain(name(), "y", in[kY]);
  expect_dim(name(), "y", in[kY], 0, in[kX].dim(0), "tokens of 'x'");
  expect_dim(name(), "y", in[kY], 1, in[kX].dim(2), "columns of 'x'");
  const int64_t n = in[kX].fixed(1);
  expect_dim(name(), "weights", in[kWeights], 1, n * (n + 2), "streams of 'x'");
  return {plain_type(in[kX].dtype, in[kX].dims())};
}

DType ExpandStreams::wanted_dtype(std::span<const TensorType> in, int port) const {
  return wanted_of(in, port, kWeights);
}

std::vector<Sharding> ExpandStreams::infer_sharding(std::span<const TensorType> in) const {
  return expect_whole_streams(*this, in);
}

Cost ExpandStreams::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                         const SymbolValues& symbols) const {
  const double streams = static_cast<double>(in[kX].fixed(1));
  return {(pass == Pass::backward ? 4 : 2) * (streams + 1) * static_cast<double>(in[kX].num_elements(symbols)),
          traffic_bytes(*this, pass, in, out, symbols)};
}

void ExpandStreams::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return reference_backward(in, out);
  const auto n = static_cast<size_t>(in[kX].shape[1]), hidden = static_cast<size_t>(in[kX].shape[2]);
  for (size_t t = 0; t < static_cast<size_t>(in[kX].shape[0]); ++t) {
    const double *post = &in[kWeights].data[t * n * (n + 2) + n], *comb = post + n;
    for (size_t i = 0; i < n; ++i)
      for (size_t d = 0; d < hidden; ++d) {
        double& z = out[0].data[(t * n + i) * hidden + d];
        z = post[i] * in[kY].data[t * hidden + d];
        for (size_t j = 0; j < n; ++j) z += comb[j * n + i] * in[kX].data[(t * n + j) * hidden + d];
      }
  }
}

void ExpandStreams::reference_backward(std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto n = static_cast<size_t>(in[kX].shape[1]), hidden = static_cast<size_t>(in[kX].shape[2]);
  for (RefTensor& tensor : out) std::fill(tensor.data.begin(), tensor.data.end(), 0.0);
  for (size_t t = 0; t < static_cast<size_t>(in[kX].shape[0]); ++t) {
    const size_t first_post = t * n * (n + 2) + n, first_comb = first_post + n;
    for (size_t i = 0; i < n; ++i)
      for (size_t d = 0; d < hidden; ++d) {
        const double dz = in[3].data[(t * n + i) * hidden + d];
        if (!out[1].data.empty()) out[1].data[t * hidden + d] += in[kWeights].data[first_post + i] * dz;
        if (!out[2].data.empty()) out[2].data[first_post + i] += in[kY].data[t * hidden + d] * dz;
        for (size_t j = 0; j < n; ++j) {
          const size_t x = (t * n + j) * hidden + d, weight = first_comb + j * n + i;
          if (!out[0].data.empty()) out[0].data[x] += in[kWeights].data[weight] * dz;
          if (!out[2].data.empty()) out[2].data[weight] += in[kX].data[x] * dz;
        }
      }
  }
}

std::vector<Workload> ExpandStreams::workloads() {
  std::vector<Workload> rows;
  for (const StreamShape& shape : kStreamShapes)
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(shape.model, step, "expand_streams"),
                      std::make_shared<ExpandStreams>(),
                      {TensorType(shape.dtype, {Symbol::tokens, shape.streams, shape.hidden}),
                       TensorType(shape.dtype, {Symbol::tokens, shape.hidden}),
                       TensorType(DType::f32, {Symbol::tokens, shape.width()})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
