// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/sampling/sample.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "eadem/core/philox.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

using kernels::SampleRow;
using kernels::SampleSettings;

enum SampleIn { kLogits, kRows, kPenalties };

SampleRow row_of(const RefTensor& rows, size_t r) {
  std::array<int32_t, kernels::kSampleRowWords> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<int32_t>(rows.data[r * words.size() + i]);
  return std::bit_cast<SampleRow>(words);
}

void penalize(std::span<double> logits, const SampleRow& row, const RefTensor& penalties) {
  const SampleSettings& s = row.settings;
  for (auto pair = static_cast<size_t>(row.biases_begin); pair < static_cast<size_t>(row.biases_end); ++pair)
    logits[static_cast<size_t>(penalties.data[2 * pair])] +=
        static_cast<double>(std::bit_cast<float>(static_cast<int32_t>(penalties.data[2 * pair + 1])));
  for (auto pair = static_cast<size_t>(row.penalties_begin); pair < static_cast<size_t>(row.penalties_end); ++pair) {
    double& logit = logits[static_cast<size_t>(penalties.data[2 * pair])];
    const double count = penalties.data[2 * pair + 1];
    logit = logit < 0 ? logit * s.repetition_penalty : logit / s.repetition_penalty;
    logit -= s.frequency_penalty * count + (count > 0 ? s.presence_penalty : 0);
  }
  if (row.allowed_begin < 0) return;
  for (size_t token = 0; token < logits.size(); ++token) {
    const double words = penalties.data[2 * static_cast<size_t>(row.allowed_begin) + token / 32];
    const bool allowed = (static_cast<uint32_t>(static_cast<int64_t>(words)) >> (token % 32) & 1) != 0;
    if (!allowed && !std::isnan(logits[token])) logits[token] = -std::numeric_limits<double>::infinity();
  }
}

// The tokens of `order` that typical_p keeps, where `p` are probabilities up to a common factor.
std::vector<size_t> typical(std::vector<size_t> order, std::span<const double> p, double typical_p) {
  double kept = 0;
  for (size_t i : order) kept += p[i];
  std::erase_if(order, [&](size_t i) { return p[i] / kept == 0; });  // infinitely far
  double entropy = 0;
  for (size_t i : order) entropy -= p[i] / kept * std::log(p[i] / kept);
  const auto distance = [&](size_t i) { return std::fabs(-std::log(p[i] / kept) - entropy); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return distance(a) < distance(b); });
  double prefix = 0;
  double last = std::numeric_limits<double>::infinity();
  for (size_t i : order) {
    prefix += p[i];
    if (prefix >= typical_p * kept) {
      last = distance(i);
      break;
    }
  }
  std::erase_if(order, [&](size_t i) { return distance(i) > last; });
  return order;
}

// -1 for a row that cannot be sampled. `u`: the draw, in [0, 1).
int64_t draw(std::span<const double> logits, const SampleSettings& settings, float u) {
  for (double value : logits)
    if (std::isnan(value)) return -1;
  const auto largest = std::max_element(logits.begin(), logits.end());  // the first of equals
  if (largest == logits.end() || !std::isfinite(*largest)) return -1;
  if (settings.temperature == 0) return largest - logits.begin();

  // 1. p = softmax(logits / temperature)
  std::vector<double> p(logits.size());
  for (size_t i = 0; i < p.size(); ++i) p[i] = std::exp((logits[i] - *largest) / settings.temperature);
  const double all = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= all;

  // Falling logits, equal ones by rising index. Ordered by logit and not by p: p underflows, logits do not.
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });

  // 2. top_k
  if (settings.top_k > 0 && static_cast<size_t>(settings.top_k) < order.size())
    order.resize(static_cast<size_t>(settings.top_k));

  // 3. top_p, of the kept, renormalized
  double kept = 0;
  for (size_t i : order) kept += p[i];
  double prefix = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    prefix += p[order[i]];
    if (prefix >= settings.top_p * kept) {
      order.resize(i + 1);
      break;
    }
  }

  // 4. min_p
  std::erase_if(order, [&](size_t i) { return p[i] < settings.min_p * p[order.front()]; });

  // 5. typical_p
  if (settings.typical_p < 1) order = typical(std::move(order), p, settings.typical_p);

  // 6. the draw, in order of index
  std::sort(order.begin(), order.end());
  kept = 0;
  for (size_t i : order) kept += p[i];
  double cumulated = 0;
  for (size_t i : order) {
    cumulated += p[i];
    if (cumulated > static_cast<double>(u) * kept) return static_cast<int64_t>(i);
  }
  return static_cast<int64_t>(order.back());  // u * kept may round up to the whole
}

// Writes the `count` largest logits of a row to its part of top_token and top_logprob; `lse`: their log-sum-exp.
void list_top(std::span<const double> logits, size_t count, double lse, std::span<RefTensor> out, size_t r) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  for (size_t i = 0; i < std::min(count, order.size()); ++i) {
    out[2].data[r * kernels::kMostTopLogprobs + i] = static_cast<double>(order[i]);
    out[3].data[r * kernels::kMostTopLogprobs + i] = logits[order[i]] - lse;
  }
}

}  // namespace

std::vector<Port> Sample::inputs() const {
  return {{"logits"}, {"rows", Port::Role::index}, {"penalties", Port::Role::index}};
}
std::vector<Port> Sample::outputs() const {
  return {{"token", Port::Role::index},
          {"logprob", Port::Role::constant},
          {"top_token", Port::Role::index},
          {"top_logprob", Port::Role::constant}};
}

AttrsRef Sample::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> Sample::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "logits", in[kLogits], 2);
  expect_dtype(name(), "logits", in[kLogits], kF32);
  expect_plain(name(), "logits", in[kLogits]);
  static constexpr DType kInteger[] = {DType::i32};
  for (const auto& [port, port_name, width] :
       {std::tuple{kRows, "rows", kernels::kSampleRowWords}, {kPenalties, "penalties", int64_t{2}}}) {
    expect_rank(name(), port_name, in[port], 2);
    expect_dtype(name(), port_name, in[port], kInteger);
    expect_dim(name(), port_name, in[port], 1, width, port == kRows ? "words of a SampleRow" : "token and count");
  }
  expect_dim(name(), "rows", in[kRows], 0, in[kLogits].dim(0), "rows of 'logits'");
  const Dim rows = in[kLogits].dim(0);
  return {TensorType(DType::i32, {rows}), TensorType(DType::f32, {rows}),
          TensorType(DType::i32, {rows, kernels::kMostTopLogprobs}),
          TensorType(DType::f32, {rows, kernels::kMostTopLogprobs})};
}

DType Sample::wanted_dtype(std::span<const TensorType> in, int port) const {
  return port == kLogits ? DType::f32 : in[static_cast<size_t>(port)].dtype;
}

Sharding Sample::wanted_sharding(std::span<const TensorType> /*in*/, int /*port*/) const {
  return Sharding::replicated();
}

std::vector<Sharding> Sample::infer_sharding(std::span<const TensorType> in) const {
  const std::vector<Port> ports = inputs();
  for (size_t i = 0; i < ports.size(); ++i)
    expect_replicated(name(), ports[i].name, in[i], "every rank draws every row");
  return std::vector<Sharding>(outputs().size(), Sharding::replicated());
}

Cost Sample::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                  const SymbolValues& symbols) const {
  // Maximum, exponential and sum of every logit; selection by threshold is about as much again.
  const double elements = static_cast<double>(in[kLogits].num_elements(symbols));
  return {24 * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

void Sample::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const size_t rows = static_cast<size_t>(in[kLogits].shape[0]), vocab = static_cast<size_t>(in[kLogits].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    const std::span<const double> logits(in[kLogits].data.data() + r * vocab, vocab);
    const SampleRow row = row_of(in[kRows], r);
    std::vector<double> penalized(logits.begin(), logits.end());
    penalize(penalized, row, in[kPenalties]);
    const auto seed = static_cast<uint64_t>(row.settings.seed), position = static_cast<uint64_t>(row.position);
    int64_t token = draw(penalized, row.settings, uniform_float(philox4x32(seed, position).words[0]));
    if (token >= 0 && row.forced >= 0) token = row.forced;
    out[0].data[r] = static_cast<double>(token);
    out[1].data[r] = kNan;
    for (size_t i = 0; i < kernels::kMostTopLogprobs; ++i) {
      out[2].data[r * kernels::kMostTopLogprobs + i] = -1;
      out[3].data[r * kernels::kMostTopLogprobs + i] = kNan;
    }
    if (token < 0) continue;
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double value : logits) sum += std::exp(value - largest);
    const double lse = largest + std::log(sum);
    out[1].data[r] = logits[static_cast<size_t>(token)] - lse;
    list_top(logits, static_cast<size_t>(row.settings.top_logprobs), lse, out, r);
  }
}

std::vector<Workload> Sample::workloads() {
  std::vector<Workload> rows;
  const Dim n = Symbol::logit_rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "sample"),
                      std::make_shared<Sample>(),
                      {TensorType(DType::f32, {n, model.vocab}), TensorType(DType::i32, {n, kernels::kSampleRowWords}),
                       TensorType(DType::i32, {Symbol::penalties, 2})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
