// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/route.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::RouteAttrs;

Route::Route(const RouteAttrs& attrs) : attrs_(attrs) {
  if (attrs.top_k < 1) throw InvalidArgument("route: top_k is {}; expected at least 1", attrs.top_k);
  if (!(attrs.epsilon >= 0) || !std::isfinite(attrs.epsilon) || !std::isfinite(attrs.scale))
    throw InvalidArgument("route: epsilon is {} and scale {}; expected finite numbers, epsilon from 0 on",
                          attrs.epsilon, attrs.scale);
}

std::string Route::attrs_text() const {
  return fmt::format("top_k={} scoring={} renormalize={} epsilon={} scale={}", attrs_.top_k,
                     attrs_.scoring == RouteAttrs::Scoring::softmax ? "softmax" : "sigmoid", attrs_.renormalize,
                     attrs_.epsilon, attrs_.scale);
}

std::vector<TensorType> Route::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "logits", in[0], 2);
  expect_dtype(name(), "logits", in[0], kF32);
  expect_plain(name(), "logits", in[0]);
  const int64_t experts = in[0].fixed(1);
  if (attrs_.top_k > experts)
    throw InvalidArgument("route: 'logits' is {}; {} experts are chosen of each row", to_string(in[0]), attrs_.top_k);
  if (!kernels::is_absent(in[1])) {
    expect_rank(name(), "bias", in[1], 1);
    expect_dtype(name(), "bias", in[1], kF32);
    expect_plain(name(), "bias", in[1]);
    expect_dim(name(), "bias", in[1], 0, experts, "experts of 'logits'");
  }
  return {TensorType(DType::i32, {in[0].dim(0), attrs_.top_k}), TensorType(DType::f32, {in[0].dim(0), attrs_.top_k})};
}

DType Route::wanted_dtype(std::span<const TensorType> in, int port) const {
  return port == 0 ? DType::f32 : in[static_cast<size_t>(port)].dtype;
}

Sharding Route::wanted_sharding(std::span<const TensorType>, int) const { return Sharding::replicated(); }

std::vector<Sharding> Route::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "logits", in[0], "a choice needs all experts");
  return {Sharding::replicated(), Sharding::replicated()};
}

Cost Route::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                 const SymbolValues& symbols) const {
  // The scores, and a comparison with the worst that was chosen.
  const double elements = static_cast<double>(in[0].num_elements(symbols));
  return {(pass == Pass::backward ? 18 : 16) * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

std::vector<double> Route::scores(const double* logits, size_t experts) const {
  std::vector<double> result(experts);
  if (attrs_.scoring == RouteAttrs::Scoring::sigmoid) {
    for (size_t e = 0; e < experts; ++e) result[e] = 1 / (1 + std::exp(-logits[e]));
    return result;
  }
  const double largest = *std::max_element(logits, logits + experts);
  double sum = 0;
  for (size_t e = 0; e < experts; ++e) sum += result[e] = std::exp(logits[e] - largest);
  for (double& score : result) score /= sum;
  return result;
}

void Route::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return reference_backward(in, out[0]);
  const auto experts = static_cast<size_t>(in[0].shape[1]), top_k = static_cast<size_t>(attrs_.top_k);
  for (size_t t = 0; t < static_cast<size_t>(in[0].shape[0]); ++t) {
    const double* logits = &in[0].data[t * experts];
    const std::vector<double> score = scores(logits, experts);
    std::vector<double> preference(logits, logits + experts);
    if (!in[1].data.empty())
      for (size_t e = 0; e < experts; ++e) preference[e] = score[e] + in[1].data[e];
    std::vector<size_t> order(experts);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return preference[a] > preference[b]; });
    double sum = attrs_.epsilon;
    for (size_t j = 0; j < top_k; ++j) sum += score[order[j]];
    for (size_t j = 0; j < top_k; ++j) {
      out[0].data[t * top_k + j] = static_cast<double>(order[j]);
      out[1].data[t * top_k + j] = attrs_.scale * score[order[j]] / (attrs_.renormalize ? sum : 1);
    }
  }
}

// With s the scores, g their gradients (0 where nothing was chosen) and S the sum of the chosen scores plus epsilon:
//   g = scale dw                               or, renormalized, g_j = scale / S (dw_j - sum_i dw_i s_i / S)
//   dlogits = s (g - sum_i g_i s_i)            for softmax, and g s (1 - s) for sigmoid.
void Route::reference_backward(std::span<const RefTensor> in, RefTensor& dlogits) const {
  const RefTensor &logits = in[0], &chosen = in[1], &dweights = in[2];
  const auto experts = static_cast<size_t>(logits.shape[1]), top_k = static_cast<size_t>(attrs_.top_k);
  for (size_t t = 0; t < static_cast<size_t>(logits.shape[0]) && !dlogits.data.empty(); ++t) {
    const std::vector<double> s = scores(&logits.data[t * experts], experts);
    const double* dw = &dweights.data[t * top_k];
    const auto expert = [&](size_t j) { return static_cast<size_t>(chosen.data[t * top_k + j]); };
    double sum = attrs_.epsilon, weighted = 0;
    for (size_t j = 0; j < top_k; ++j) {
      sum += s[expert(j)];
      weighted += dw[j] * s[expert(j)];
    }
    std::vector<double> g(experts, 0.0);
    for (size_t j = 0; j < top_k; ++j)
      g[expert(j)] = attrs_.scale * (attrs_.renormalize ? (dw[j] - weighted / sum) / sum : dw[j]);
    double dot = 0;
    for (size_t e = 0; e < experts; ++e) dot += g[e] * s[e];
    for (size_t e = 0; e < experts; ++e)
      dlogits.data[t * experts + e] =
          attrs_.scoring == RouteAttrs::Scoring::softmax ? s[e] * (g[e] - dot) : g[e] * s[e] * (1 - s[e]);
  }
}

std::vector<Workload> Route::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "route"),
                      std::make_shared<Route>(RouteAttrs{.top_k = model.top_k, .renormalize = true}),
                      {TensorType(DType::f32, {Symbol::tokens, model.experts}), kernels::absent_port()},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
