// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/streams/stream_weights.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

StreamWeights::StreamWeights(const kernels::StreamWeightsAttrs& attrs) : attrs_(attrs) {
  if (attrs.streams < 1 || attrs.streams > 64 || attrs.iterations < 1 || attrs.iterations > 1000)
    throw InvalidArgument("stream_weights: streams is {} and iterations {}; expected 1 to 64 and 1 to 1000",
                          attrs.streams, attrs.iterations);
  if (!(attrs.eps >= 0) || !std::isfinite(attrs.eps))
    throw InvalidArgument("stream_weights: eps is {}; expected a finite number from 0 on", attrs.eps);
}

std::string StreamWeights::attrs_text() const {
  return fmt::format("streams={} iterations={} eps={}{}", attrs_.streams, attrs_.iterations, attrs_.eps,
                     attrs_.merges ? " merges" : "");
}

std::vector<TensorType> StreamWeights::infer_types(std::span<const TensorType> in) const {
  const auto expect = [&](int port, int rank, int64_t width, std::string_view because) {
    const TensorType& type = in[static_cast<size_t>(port)];
    const std::string_view label = inputs()[static_cast<size_t>(port)].name;
    expect_rank(name(), label, type, rank);
    expect_dtype(name(), label, type, kF32);
    expect_plain(name(), label, type);
    expect_dim(name(), label, type, rank - 1, width, because);
  };
  expect(kLogits, 2, attrs_.width(), "attribute streams");
  expect(kBase, 1, attrs_.width(), "attribute streams");
  expect(kScale, 1, attrs_.scales(), "attribute merges");
  return {plain_type(DType::f32, in[kLogits].dims())};
}

DType StreamWeights::wanted_dtype(std::span<const TensorType> /*in*/, int /*port*/) const { return DType::f32; }

std::vector<Sharding> StreamWeights::infer_sharding(std::span<const TensorType> in) const {
  for (const int port : {kLogits, kBase, kScale})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank mixes every token");
  return {Sharding::replicated()};
}

Cost StreamWeights::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                         const SymbolValues& symbols) const {
  // An exponential counts as 10; a division of all rows or columns takes a sum, a quotient, and twice that backward.
  const double tokens = static_cast<double>(in[kLogits].bind(symbols)[0]), n = static_cast<double>(attrs_.streams);
  const double divisions = attrs_.merges ? 0 : static_cast<double>(attrs_.divisions());
  const double flops = tokens * (13 * static_cast<double>(attrs_.width()) + 2 * n * n * divisions);
  return {(pass == Pass::backward ? 3 : 1) * flops, traffic_bytes(*this, pass, in, out, symbols)};
}

MixingSteps mixing_steps(const kernels::StreamWeightsAttrs& attrs, std::span<const double> logits) {
  const auto n = static_cast<size_t>(attrs.streams);
  const auto eps = static_cast<double>(attrs.eps);
  std::vector<double> comb(n * n);
  for (size_t i = 0; i < n; ++i) {
    const double* row = &logits[i * n];
    const double largest = *std::max_element(row, row + n);
    double sum = 0;
    for (size_t j = 0; j < n; ++j) sum += comb[i * n + j] = std::exp(row[j] - largest);
    for (size_t j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / sum + eps;
  }
  MixingSteps steps;
  steps.states.push_back(comb);
  for (size_t k = 0; k < static_cast<size_t>(attrs.divisions()); ++k) {
    const size_t along = MixingSteps::divides_columns(k) ? n : 1, across = MixingSteps::divides_columns(k) ? 1 : n;
    std::vector<double> divisors(n, eps);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j) divisors[i] += comb[i * across + j * along];
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j) comb[i * across + j * along] /= divisors[i];
    steps.states.push_back(comb);
    steps.divisors.push_back(std::move(divisors));
  }
  return steps;
}

void StreamWeights::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return reference_backward(in, out);
  const auto n = static_cast<size_t>(attrs_.streams), width = static_cast<size_t>(attrs_.width());
  std::vector<double> z(width);
  for (size_t t = 0; t < static_cast<size_t>(in[kLogits].shape[0]); ++t) {
    double* weights = &out[0].data[t * width];
    for (size_t i = 0; i < width; ++i)
      z[i] = in[kScale].data[std::min<size_t>(i / n, 2)] * in[kLogits].data[t * width + i] + in[kBase].data[i];
    for (size_t i = 0; i < n; ++i) weights[i] = logistic(z[i]) + static_cast<double>(attrs_.eps);
    if (attrs_.merges) continue;
    for (size_t i = n; i < 2 * n; ++i) weights[i] = 2 * logistic(z[i]);
    const MixingSteps steps = mixing_steps(attrs_, std::span(z).subspan(2 * n));
    std::copy(steps.states.back().begin(), steps.states.back().end(), weights + 2 * n);
  }
}

// A division c' = c / S of a row or column by S, its sum and eps: dc = (dc' - sum of dc' c') / S. A softmax p of a row:
// dz = p (dp - sum of dp p).
void StreamWeights::reference_backward(std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto n = static_cast<size_t>(attrs_.streams), width = static_cast<size_t>(attrs_.width());
  const auto eps = static_cast<double>(attrs_.eps);
  std::vector<double> z(width), dz(width);
  for (size_t t = 0; t < static_cast<size_t>(in[kLogits].shape[0]); ++t) {
    const double *logits = &in[kLogits].data[t * width], *dweights = &in[3].data[t * width];
    for (size_t i = 0; i < width; ++i)
      z[i] = in[kScale].data[std::min<size_t>(i / n, 2)] * logits[i] + in[kBase].data[i];
    for (size_t i = 0; i < std::min(width, 2 * n); ++i)
      dz[i] = (i < n ? 1 : 2) * dweights[i] * logistic(z[i]) * logistic(-z[i]);
    if (!attrs_.merges) {
      const MixingSteps steps = mixing_steps(attrs_, std::span(z).subspan(2 * n));
      std::vector<double> d(dweights + 2 * n, dweights + width);
      for (size_t k = steps.divisors.size(); k-- > 0;) {
        const size_t along = MixingSteps::divides_columns(k) ? n : 1, across = MixingSteps::divides_columns(k) ? 1 : n;
        for (size_t i = 0; i < n; ++i) {
          double dot = 0;
          for (size_t j = 0; j < n; ++j) dot += d[i * across + j * along] * steps.states[k + 1][i * across + j * along];
          for (size_t j = 0; j < n; ++j)
            d[i * across + j * along] = (d[i * across + j * along] - dot) / steps.divisors[k][i];
        }
      }
      for (size_t i = 0; i < n; ++i) {
        double dot = 0;
        for (size_t j = 0; j < n; ++j) dot += d[i * n + j] * (steps.states[0][i * n + j] - eps);
        for (size_t j = 0; j < n; ++j) dz[(2 + i) * n + j] = (steps.states[0][i * n + j] - eps) * (d[i * n + j] - dot);
      }
    }
    for (size_t i = 0; i < width; ++i) {
      const size_t part = std::min<size_t>(i / n, 2);
      if (!out[0].data.empty()) out[0].data[t * width + i] = dz[i] * in[kScale].data[part];
      if (!out[1].data.empty()) out[1].data[i] += dz[i];
      if (!out[2].data.empty()) out[2].data[part] += dz[i] * logits[i];
    }
  }
}

std::vector<Workload> StreamWeights::workloads() {
  struct ModelShape {
    const char* model;
    int64_t streams, iterations;
  };
  std::vector<Workload> rows;
  for (const ModelShape& shape : {ModelShape{"tiny", 3, 4}, ModelShape{"deepseek-v4", 4, 20}})
    for (const StepShape& step : step_shapes())
      for (const bool merges : {false, true}) {
        const kernels::StreamWeightsAttrs attrs{
            .streams = shape.streams, .iterations = shape.iterations, .eps = 1e-6f, .merges = merges};
        rows.push_back({workload_name(shape.model, step, merges ? "stream_weights merging" : "stream_weights"),
                        std::make_shared<StreamWeights>(attrs),
                        {TensorType(DType::f32, {Symbol::tokens, attrs.width()}),
                         TensorType(DType::f32, {attrs.width()}), TensorType(DType::f32, {attrs.scales()})},
                        symbols_of(step)});
      }
  return rows;
}

}  // namespace eadem::ops
