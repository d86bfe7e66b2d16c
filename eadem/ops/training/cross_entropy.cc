// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/training/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

// To e5m2 with the scale of the largest of `limits`, by magnitude.
void round_to_e5m2(std::vector<double>& values, const std::vector<double>& limits) {
  constexpr auto kKind = Fp8Format::Kind::e5m2;
  double most = 0;
  for (const double limit : limits) most = std::max(most, std::fabs(limit));
  const float scale = static_cast<float>(most) / fp8_largest(kKind);
  for (double& value : values)
    value = static_cast<double>(
        scale * fp8_to_float(kKind, Fp8TensorEncoding::code_of(kKind, static_cast<float>(value), scale)));
}

}  // namespace

std::vector<TensorType> CrossEntropy::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "logits", in[0], 2);
  expect_dtype(name(), "logits", in[0], kActivations);
  expect_plain(name(), "logits", in[0]);
  expect_rank(name(), "labels", in[1], 1);
  expect_dtype(name(), "labels", in[1], kI32);
  expect_dim(name(), "labels", in[1], 0, in[0].dim(0), "rows of 'logits'");
  return {TensorType(DType::f32, {in[0].dim(0)})};
}

DType CrossEntropy::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType dtype = in[static_cast<size_t>(port)].dtype;
  return port == 0 && dtype == DType::f16 ? DType::f32 : dtype;
}

std::vector<Sharding> CrossEntropy::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "logits", in[0], "a divided vocabulary is not implemented");
  expect_replicated(name(), "labels", in[1], "every rank sees every row");
  return {Sharding::replicated()};
}

std::vector<TensorType> CrossEntropy::extra_types(std::span<const TensorType> in) const {
  return {TensorType(DType::f32, {in[0].dim(0)})};
}

Cost CrossEntropy::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                        const SymbolValues& symbols) const {
  const double elements = static_cast<double>(in[0].num_elements(symbols));
  return {13 * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

void CrossEntropy::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const size_t rows = static_cast<size_t>(in[0].shape[0]), vocab = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    const double* logits = &in[0].data[r * vocab];
    const auto label = static_cast<int64_t>(in[1].data[r]);
    if (pass == Pass::backward) {
      if (out[0].data.empty()) return;
      const double lse = in[2].data[r], dloss = in[3].data[r];
      for (size_t i = 0; i < vocab; ++i) {
        const double target = static_cast<int64_t>(i) == label ? 1 : 0;
        out[0].data[r * vocab + i] = label < 0 ? 0 : dloss * (std::exp(logits[i] - lse) - target);
      }
      if (attrs_.dlogits_in_e5m2 && r + 1 == rows) round_to_e5m2(out[0].data, in[3].data);
      continue;
    }
    const double largest = *std::max_element(logits, logits + vocab);
    double sum = 0;
    for (size_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] - largest);
    const double lse = largest + std::log(sum);
    out[0].data[r] = label < 0 ? 0 : lse - logits[label];
    if (pass == Pass::forward && !out[1].data.empty()) out[1].data[r] = lse;
  }
}

std::vector<Workload> CrossEntropy::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "cross_entropy"),
                      std::make_shared<CrossEntropy>(),
                      {TensorType(DType::f32, {Symbol::tokens, model.vocab}), TensorType(DType::i32, {Symbol::tokens})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
