// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/route.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::RouteAttrs;
using Scoring = RouteAttrs::Scoring;

namespace {

std::string_view scoring_name(Scoring scoring) {
  switch (scoring) {
    case Scoring::softmax: return "softmax";
    case Scoring::sigmoid: return "sigmoid";
    case Scoring::sqrt_softplus: return "sqrt_softplus";
  }
  return "?";
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

Route::Route(const RouteAttrs& attrs) : attrs_(attrs) {
  if (attrs.top_k < 1) throw InvalidArgument("route: top_k is {}; expected at least 1", attrs.top_k);
  const auto is_sum = [](float value) { return value >= 0 && std::isfinite(value); };
  if (!is_sum(attrs.epsilon) || !is_sum(attrs.least_sum) || !std::isfinite(attrs.scale))
    throw InvalidArgument(
        "route: epsilon is {}, least_sum {} and scale {}; expected finite numbers, the first two from 0 on",
        attrs.epsilon, attrs.least_sum, attrs.scale);
  if (attrs.top_groups < 1 || attrs.groups < attrs.top_groups || attrs.group_best < 1 || attrs.group_best > 2)
    throw InvalidArgument("route: top_groups is {} of {} groups, group_best {}; expected 1 to {}, and 1 or 2",
                          attrs.top_groups, attrs.groups, attrs.group_best, attrs.groups);
  if (attrs.by_token && (attrs.groups > 1 || attrs.scoring == Scoring::softmax))
    throw InvalidArgument("route: experts by token with {} groups and scores by {}; expected 1, and no softmax",
                          attrs.groups, scoring_name(attrs.scoring));
}

std::vector<Port> Route::inputs() const {
  std::vector<Port> ports = {{"logits"}, {"bias", Port::Role::constant, /*optional=*/true}};
  if (attrs_.by_token) {
    ports.push_back({"table", Port::Role::constant});
    ports.push_back({"token_ids", Port::Role::index});
  }
  return ports;
}

std::string Route::attrs_text() const {
  std::string text = fmt::format("top_k={} scoring={} renormalize={} epsilon={} scale={}", attrs_.top_k,
                                 scoring_name(attrs_.scoring), attrs_.renormalize, attrs_.epsilon, attrs_.scale);
  if (attrs_.least_sum > 0) text += fmt::format(" least_sum={}", attrs_.least_sum);
  if (attrs_.groups > 1)
    text += fmt::format(" groups={} top_groups={} group_best={}", attrs_.groups, attrs_.top_groups, attrs_.group_best);
  if (attrs_.by_token) text += " by_token";
  return text;
}

std::vector<TensorType> Route::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "logits", in[0], 2);
  expect_dtype(name(), "logits", in[0], kF32);
  expect_plain(name(), "logits", in[0]);
  const int64_t experts = in[0].fixed(1);
  if (attrs_.top_k > experts)
    throw InvalidArgument("route: 'logits' is {}; {} experts are chosen of each row", to_string(in[0]), attrs_.top_k);
  const int64_t group = experts / attrs_.groups;
  if (experts % attrs_.groups != 0 || attrs_.top_k > attrs_.top_groups * group || attrs_.group_best > group)
    throw InvalidArgument("route: 'logits' is {}; {} experts are chosen of {} groups of {}", to_string(in[0]),
                          attrs_.top_k, attrs_.top_groups, attrs_.groups);
  if (!kernels::is_unconnected(in[1])) {
    expect_rank(name(), "bias", in[1], 1);
    expect_dtype(name(), "bias", in[1], kF32);
    expect_plain(name(), "bias", in[1]);
    expect_dim(name(), "bias", in[1], 0, experts, "experts of 'logits'");
    if (attrs_.by_token)
      throw InvalidArgument("route: 'bias' is {}; experts by token are not chosen", to_string(in[1]));
  }
  if (attrs_.by_token) {
    expect_rank(name(), "table", in[2], 2);
    expect_dtype(name(), "table", in[2], kF32);
    expect_plain(name(), "table", in[2]);
    expect_dim(name(), "table", in[2], 1, attrs_.top_k, "attribute top_k");
    expect_rank(name(), "token_ids", in[3], 1);
    expect_dtype(name(), "token_ids", in[3], kI32);
    expect_dim(name(), "token_ids", in[3], 0, in[0].dim(0), "tokens of 'logits'");
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
  if (attrs_.scoring == Scoring::sigmoid) {
    for (size_t e = 0; e < experts; ++e) result[e] = sigmoid(logits[e]);
    return result;
  }
  if (attrs_.scoring == Scoring::sqrt_softplus) {
    for (size_t e = 0; e < experts; ++e)
      result[e] = std::sqrt(std::max(logits[e], 0.0) + std::log1p(std::exp(-std::fabs(logits[e]))));
    return result;
  }
  const double largest = *std::max_element(logits, logits + experts);
  double sum = 0;
  for (size_t e = 0; e < experts; ++e) sum += result[e] = std::exp(logits[e] - largest);
  for (double& score : result) score /= sum;
  return result;
}

std::vector<bool> Route::chosen_groups(const std::vector<double>& preference) const {
  const auto groups = static_cast<size_t>(attrs_.groups), group = preference.size() / groups;
  std::vector<double> worth;
  for (size_t g = 0; g < groups; ++g) {
    std::vector<double> own(preference.begin() + static_cast<std::ptrdiff_t>(g * group),
                            preference.begin() + static_cast<std::ptrdiff_t>((g + 1) * group));
    std::sort(own.rbegin(), own.rend());
    worth.push_back(std::accumulate(own.begin(), own.begin() + attrs_.group_best, 0.0));
  }
  std::vector<size_t> order(groups);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return worth[a] > worth[b]; });
  std::vector<bool> chosen(groups, false);
  for (size_t j = 0; j < static_cast<size_t>(attrs_.top_groups); ++j) chosen[order[j]] = true;
  return chosen;
}

std::vector<size_t> Route::choose(const std::vector<double>& preference) const {
  const std::vector<bool> in_group = chosen_groups(preference);
  const size_t group = preference.size() / in_group.size();
  std::vector<size_t> order;
  for (size_t e = 0; e < preference.size(); ++e)
    if (in_group[e / group]) order.push_back(e);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return preference[a] > preference[b]; });
  order.resize(static_cast<size_t>(attrs_.top_k));
  return order;
}

double Route::divisor(double sum) const {
  return attrs_.renormalize ? std::max(sum + attrs_.epsilon, static_cast<double>(attrs_.least_sum)) : 1;
}

void Route::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return reference_backward(in, out[0]);
  const auto experts = static_cast<size_t>(in[0].shape[1]), top_k = static_cast<size_t>(attrs_.top_k);
  for (size_t t = 0; t < static_cast<size_t>(in[0].shape[0]); ++t) {
    const double* logits = &in[0].data[t * experts];
    const std::vector<double> score = scores(logits, experts);
    std::vector<double> preference(logits, logits + experts);
    const bool has_bias = !in[1].data.empty();
    for (size_t e = 0; e < experts && attrs_.by_score(has_bias); ++e)
      preference[e] = score[e] + (has_bias ? in[1].data[e] : 0);
    std::vector<size_t> order;
    if (!attrs_.by_token) order = choose(preference);
    for (size_t j = 0; j < top_k && attrs_.by_token; ++j) {
      const size_t row = static_cast<size_t>(in[3].data[t]) * top_k;
      order.push_back(static_cast<size_t>(std::clamp(in[2].data[row + j], 0.0, static_cast<double>(experts - 1))));
    }
    double sum = 0;
    for (size_t j = 0; j < top_k; ++j) sum += score[order[j]];
    for (size_t j = 0; j < top_k; ++j) {
      out[0].data[t * top_k + j] = static_cast<double>(order[j]);
      out[1].data[t * top_k + j] = attrs_.scale * score[order[j]] / divisor(sum);
    }
  }
}

// With s the scores, g their gradients (0 where nothing was chosen) and S the divisor of the chosen scores:
//   g = scale dw                               or, renormalized, g_j = scale / S (dw_j - sum_i dw_i s_i / S),
//                                              where S is least_sum without the subtrahend
//   dlogits = s (g - sum_i g_i s_i)            for softmax, g s (1 - s) for sigmoid, and g sigmoid(logits) / (2 s).
void Route::reference_backward(std::span<const RefTensor> in, RefTensor& dlogits) const {
  const RefTensor &logits = in[0], &chosen = in[1], &dweights = in[2];
  const auto experts = static_cast<size_t>(logits.shape[1]), top_k = static_cast<size_t>(attrs_.top_k);
  for (size_t t = 0; t < static_cast<size_t>(logits.shape[0]) && !dlogits.data.empty(); ++t) {
    const std::vector<double> s = scores(&logits.data[t * experts], experts);
    const double* dw = &dweights.data[t * top_k];
    const auto expert = [&](size_t j) { return static_cast<size_t>(chosen.data[t * top_k + j]); };
    double chosen_sum = 0, weighted = 0;
    for (size_t j = 0; j < top_k; ++j) {
      chosen_sum += s[expert(j)];
      weighted += dw[j] * s[expert(j)];
    }
    const double sum = divisor(chosen_sum);
    const bool sum_varies = attrs_.renormalize && chosen_sum + attrs_.epsilon >= attrs_.least_sum;
    std::vector<double> g(experts, 0.0);
    for (size_t j = 0; j < top_k; ++j) g[expert(j)] += attrs_.scale * (dw[j] - (sum_varies ? weighted / sum : 0)) / sum;
    double dot = 0;
    for (size_t e = 0; e < experts; ++e) dot += g[e] * s[e];
    for (size_t e = 0; e < experts; ++e) {
      double& dlogit = dlogits.data[t * experts + e];
      switch (attrs_.scoring) {
        case Scoring::softmax: dlogit = s[e] * (g[e] - dot); break;
        case Scoring::sigmoid: dlogit = g[e] * s[e] * (1 - s[e]); break;
        case Scoring::sqrt_softplus: dlogit = g[e] * sigmoid(logits.data[t * experts + e]) / (2 * s[e]); break;
      }
    }
  }
}

std::vector<Workload> Route::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "route"),
                      std::make_shared<Route>(RouteAttrs{.top_k = model.top_k, .renormalize = true}),
                      {TensorType(DType::f32, {Symbol::tokens, model.experts}), kernels::unconnected_port()},
                      symbols_of(step)});
  for (const StepShape& step : step_shapes())
    rows.push_back({workload_name("deepseek-v4", step, "route by token"),
                    std::make_shared<Route>(RouteAttrs{.top_k = 6,
                                                       .scoring = Scoring::sqrt_softplus,
                                                       .renormalize = true,
                                                       .epsilon = 1e-20f,
                                                       .scale = 1.5f,
                                                       .by_token = true}),
                    {TensorType(DType::f32, {Symbol::tokens, 256}), kernels::unconnected_port(),
                     TensorType(DType::f32, {129280, 6}), TensorType(DType::i32, {Symbol::tokens})},
                    symbols_of(step)});
  for (const StepShape& step : step_shapes())
    rows.push_back({workload_name("deepseek-v3", step, "route"),
                    std::make_shared<Route>(RouteAttrs{.top_k = 8,
                                                       .scoring = Scoring::sigmoid,
                                                       .renormalize = true,
                                                       .epsilon = 1e-20f,
                                                       .scale = 2.5f,
                                                       .groups = 8,
                                                       .top_groups = 4,
                                                       .group_best = 2}),
                    {TensorType(DType::f32, {Symbol::tokens, 256}), TensorType(DType::f32, {256})},
                    symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
