// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/load_balancing_loss.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

std::vector<double> probabilities_of(const double* logits, size_t experts) {
  std::vector<double> result(logits, logits + experts);
  const double largest = *std::max_element(result.begin(), result.end());
  double sum = 0;
  for (double& value : result) sum += value = std::exp(value - largest);
  for (double& value : result) value /= sum;
  return result;
}

}  // namespace

LoadBalancingLoss::LoadBalancingLoss(int layers, const kernels::LoadBalancingLossAttrs& attrs) : attrs_(attrs) {
  if (layers < 1 || attrs.top_k < 1)
    throw InvalidArgument("load_balancing_loss: {} layers and top_k {}; expected at least 1 of each", layers,
                          attrs.top_k);
  for (int layer = 0; layer < layers; ++layer) port_names_.push_back("logits" + std::to_string(layer));
}

std::vector<Port> LoadBalancingLoss::inputs() const {
  std::vector<Port> ports;
  for (const std::string& port_name : port_names_) ports.push_back({port_name});
  return ports;
}

std::string LoadBalancingLoss::attrs_text() const {
  return fmt::format("layers={} top_k={}", port_names_.size(), attrs_.top_k);
}

std::vector<TensorType> LoadBalancingLoss::infer_types(std::span<const TensorType> in) const {
  for (size_t layer = 0; layer < port_names_.size(); ++layer) {
    expect_rank(name(), port_names_[layer], in[layer], 2);
    expect_dtype(name(), port_names_[layer], in[layer], kF32);
    expect_plain(name(), port_names_[layer], in[layer]);
    expect_same_dims(name(), port_names_[layer], in[layer], in[0], port_names_[0]);
  }
  if (attrs_.top_k > in[0].fixed(1))
    throw InvalidArgument("load_balancing_loss: 'logits0' is {}; {} experts are chosen of each row", to_string(in[0]),
                          attrs_.top_k);
  return {TensorType(DType::f32, {1})};
}

Sharding LoadBalancingLoss::wanted_sharding(std::span<const TensorType>, int) const { return Sharding::replicated(); }

std::vector<Sharding> LoadBalancingLoss::infer_sharding(std::span<const TensorType> in) const {
  for (size_t layer = 0; layer < port_names_.size(); ++layer)
    expect_replicated(name(), port_names_[layer], in[layer], "a choice needs all experts");
  return {Sharding::replicated()};
}

std::vector<Saved> LoadBalancingLoss::saved() const {
  std::vector<Saved> result;
  for (size_t layer = 0; layer < port_names_.size(); ++layer)
    result.push_back({Saved::Kind::input, static_cast<int>(layer)});
  result.push_back({Saved::Kind::extra, 0});
  return result;
}

std::vector<TensorType> LoadBalancingLoss::extra_types(std::span<const TensorType> in) const {
  return {TensorType(DType::f32, {in[0].dim(1)})};
}

Cost LoadBalancingLoss::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                             const SymbolValues& symbols) const {
  // Probabilities and their sums, and a comparison with the worst that was chosen; backward a dot product with them.
  const double elements = static_cast<double>(in[0].num_elements(symbols)) * static_cast<double>(port_names_.size());
  return {16 * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

void LoadBalancingLoss::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return reference_backward(in, out);
  const auto tokens = static_cast<size_t>(in[0].shape[0]), experts = static_cast<size_t>(in[0].shape[1]);
  const double rows = static_cast<double>(std::max<size_t>(1, tokens * in.size()));
  std::vector<double> fractions(experts, 0.0), means(experts, 0.0);
  for (const RefTensor& layer : in)
    for (size_t t = 0; t < tokens; ++t) {
      const double* logits = &layer.data[t * experts];
      const std::vector<double> probabilities = probabilities_of(logits, experts);
      for (size_t e = 0; e < experts; ++e) means[e] += probabilities[e] / rows;
      std::vector<size_t> order(experts);
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
      for (size_t j = 0; j < static_cast<size_t>(attrs_.top_k); ++j) fractions[order[j]] += 1;
    }
  double loss = 0;
  for (size_t e = 0; e < experts; ++e) loss += static_cast<double>(experts) * (fractions[e] /= rows) * means[e];
  out[0].data[0] = loss;
  if (pass == Pass::forward && !out[1].data.empty()) out[1].data = fractions;
}

// With p the probabilities of a row and f the fractions: dlogits = dloss experts / rows * p (f - sum_i p_i f_i).
void LoadBalancingLoss::reference_backward(std::span<const RefTensor> in, std::span<RefTensor> dlogits) const {
  const size_t layers = port_names_.size();
  const auto tokens = static_cast<size_t>(in[0].shape[0]), experts = static_cast<size_t>(in[0].shape[1]);
  const std::vector<double>& fractions = in[layers].data;
  const double scale = in[layers + 1].data[0] * static_cast<double>(experts) / static_cast<double>(tokens * layers);
  for (size_t layer = 0; layer < layers; ++layer)
    for (size_t t = 0; t < tokens && !dlogits[layer].data.empty(); ++t) {
      const std::vector<double> p = probabilities_of(&in[layer].data[t * experts], experts);
      const double mean = std::inner_product(p.begin(), p.end(), fractions.begin(), 0.0);
      for (size_t e = 0; e < experts; ++e) dlogits[layer].data[t * experts + e] = scale * p[e] * (fractions[e] - mean);
    }
}

std::vector<Workload> LoadBalancingLoss::workloads() {
  constexpr int kLayers = 4;
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model.name, step, "load_balancing_loss of four layers"),
           std::make_shared<LoadBalancingLoss>(kLayers, kernels::LoadBalancingLossAttrs{.top_k = model.top_k}),
           std::vector<TensorType>(kLayers, TensorType(DType::f32, {Symbol::tokens, model.experts})),
           symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
