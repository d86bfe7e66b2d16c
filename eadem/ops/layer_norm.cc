// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/layer_norm.h"

#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

LayerNorm::LayerNorm(const kernels::LayerNormAttrs& attrs) : attrs_(attrs) {
  if (!std::isfinite(attrs.eps) || attrs.eps < 0)
    throw InvalidArgument("layer_norm: eps is {}; expected a finite number >= 0", attrs.eps);
}

std::vector<Port> LayerNorm::inputs() const {
  return {{"x"}, {"weight", Port::Role::parameter}, {"bias", Port::Role::parameter, /*optional=*/true}};
}
std::vector<Port> LayerNorm::outputs() const { return {{"y"}}; }
std::string LayerNorm::attrs_text() const { return fmt::format("eps={}", attrs_.eps); }

std::vector<TensorType> LayerNorm::infer_types(std::span<const TensorType> in) const {
  if (in[kX].rank() < 1)
    throw InvalidArgument("layer_norm: 'x' is {}; expected at least 1 dimension", to_string(in[kX]));
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  const DType weight_dtypes[] = {DType::f32, in[kX].dtype}, like_weight[] = {in[kWeight].dtype};
  expect_dtype(name(), "weight", in[kWeight], weight_dtypes);
  for (int port : {kWeight, kBias}) {
    const TensorType& type = in[static_cast<size_t>(port)];
    if (port == kBias && kernels::is_unconnected(type)) continue;
    const std::string_view label = port == kWeight ? "weight" : "bias";
    expect_rank(name(), label, type, 1);
    expect_dtype(name(), label, type, like_weight);
    expect_plain(name(), label, type);
    expect_dim(name(), label, type, 0, in[kX].dim(-1), "last dimension of 'x'");
  }
  return {plain_type(in[kX].dtype, in[kX].dims())};
}

DType LayerNorm::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType x = in[kX].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  if (port == kX) return x;
  if (kernels::is_unconnected(in[static_cast<size_t>(port)])) return in[static_cast<size_t>(port)].dtype;
  return in[kWeight].dtype == x ? x : DType::f32;
}

std::vector<Sharding> LayerNorm::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "weight", in[kWeight], "every row needs all of it");
  if (!kernels::is_unconnected(in[kBias])) expect_replicated(name(), "bias", in[kBias], "every row needs all of it");
  const Sharding& x = in[kX].sharding;
  if (x.kind == Sharding::Kind::partial || x == Sharding::along(in[kX].rank() - 1))
    throw InvalidArgument("layer_norm: 'x' is {}; expected whole rows, neither partial nor divided along the last axis",
                          to_string(in[kX]));
  return {x};
}

std::vector<TensorType> LayerNorm::extra_types(std::span<const TensorType> in) const {
  const TensorType per_row = plain_type(DType::f32, in[kX].dims().first(static_cast<size_t>(in[kX].rank() - 1)));
  return {per_row, per_row};
}

Cost LayerNorm::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  const double elements = static_cast<double>(in[kX].num_elements(symbols));
  return {(pass == Pass::backward ? 14 : 7) * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

// With z = (x - mean) s, s = 1 / std and g = w dy:  dx = s (g - mean(g) - z mean(g z)).
void LayerNorm::backward_reference(std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[0], &weight = in[1], &dy = in[4];
  const size_t hidden = static_cast<size_t>(x.shape.back()), rows = static_cast<size_t>(x.shape.num_rows());
  for (size_t r = 0; r < rows; ++r) {
    const double mean = in[2].data[r], s = in[3].data[r];
    double g_sum = 0, gz_sum = 0;
    for (size_t i = 0; i < hidden; ++i) {
      const double g = weight.data[i] * dy.data[r * hidden + i];
      g_sum += g;
      gz_sum += g * (x.data[r * hidden + i] - mean) * s;
    }
    for (size_t i = 0; i < hidden; ++i) {
      const double z = (x.data[r * hidden + i] - mean) * s, gradient = dy.data[r * hidden + i];
      if (!out[0].data.empty())
        out[0].data[r * hidden + i] =
            s * (weight.data[i] * gradient - (g_sum + z * gz_sum) / static_cast<double>(hidden));
      if (!out[1].data.empty()) out[1].data[i] += gradient * z;
      if (!out[2].data.empty()) out[2].data[i] += gradient;
    }
  }
}

void LayerNorm::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return backward_reference(in, out);
  const RefTensor &x = in[kX], &weight = in[kWeight], &bias = in[kBias];
  const size_t hidden = static_cast<size_t>(x.shape.back()), rows = static_cast<size_t>(x.shape.num_rows());
  for (size_t r = 0; r < rows; ++r) {
    const double* row = &x.data[r * hidden];
    double sum = 0, squares = 0;
    for (size_t i = 0; i < hidden; ++i) sum += row[i];
    const double mean = sum / static_cast<double>(hidden);
    for (size_t i = 0; i < hidden; ++i) squares += (row[i] - mean) * (row[i] - mean);
    const double s = 1.0 / std::sqrt(squares / static_cast<double>(hidden) + static_cast<double>(attrs_.eps));
    for (size_t i = 0; i < hidden; ++i)
      out[0].data[r * hidden + i] = (row[i] - mean) * s * weight.data[i] + (bias.data.empty() ? 0 : bias.data[i]);
    if (pass != Pass::forward) continue;
    if (!out[1].data.empty()) out[1].data[r] = mean;
    if (!out[2].data.empty()) out[2].data[r] = s;
  }
}

std::vector<Workload> LayerNorm::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes()) {
      const TensorType weight(model.dtype, {model.hidden});
      rows.push_back({workload_name(model, step, "layer norm"),
                      std::make_shared<LayerNorm>(kernels::LayerNormAttrs{1e-5f}),
                      {TensorType(model.dtype, {Symbol::tokens, model.hidden}), weight, weight},
                      symbols_of(step)});
    }
  return rows;
}

}  // namespace eadem::ops
