// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

RmsNorm::RmsNorm(const kernels::RmsNormAttrs& attrs) : attrs_(attrs) {
  if (!std::isfinite(attrs.eps) || attrs.eps < 0)
    throw InvalidArgument("rms_norm: eps is {}; expected a finite number >= 0", attrs.eps);
}

std::vector<Port> RmsNorm::inputs() const { return {{"x"}, {"weight", Port::Role::parameter}}; }
std::vector<Port> RmsNorm::outputs() const { return {{"y"}}; }
std::string RmsNorm::attrs_text() const { return fmt::format("eps={}", attrs_.eps); }

std::vector<TensorType> RmsNorm::infer_types(std::span<const TensorType> in) const {
  if (in[kX].rank() < 1) throw InvalidArgument("rms_norm: 'x' is {}; expected at least 1 dimension", to_string(in[kX]));
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  const bool grouped = in[kWeight].rank() == 2 && in[kX].rank() >= 2;
  if (!grouped) expect_rank(name(), "weight", in[kWeight], 1);
  const DType weight_dtypes[] = {DType::f32, in[kX].dtype};
  expect_dtype(name(), "weight", in[kWeight], weight_dtypes);
  expect_plain(name(), "weight", in[kWeight]);
  expect_dim(name(), "weight", in[kWeight], in[kWeight].rank() - 1, in[kX].dim(-1), "last dimension of 'x'");
  if (grouped) expect_dim(name(), "weight", in[kWeight], 0, in[kX].dim(-2), "groups of 'x'");
  return {plain_type(in[kX].dtype, in[kX].dims())};
}

DType RmsNorm::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType x = in[kX].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  if (port == kX) return x;
  return in[kWeight].dtype == x ? x : DType::f32;
}

std::vector<Sharding> RmsNorm::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& x = in[kX].sharding;
  const bool grouped = in[kWeight].rank() == 2, by_groups = grouped && x == Sharding::along(in[kX].rank() - 2);
  if (by_groups && !(in[kWeight].sharding == Sharding::along(0)))
    throw InvalidArgument("rms_norm: 'weight' is {} but 'x' is {}; expected the groups divided alike",
                          to_string(in[kWeight]), to_string(in[kX]));
  if (!by_groups) expect_replicated(name(), "weight", in[kWeight], "every row needs all of it");
  if (x.kind == Sharding::Kind::partial || x == Sharding::along(in[kX].rank() - 1))
    throw InvalidArgument("rms_norm: 'x' is {}; expected whole rows, neither partial nor divided along the last axis",
                          to_string(in[kX]));
  return {x};
}

std::vector<TensorType> RmsNorm::extra_types(std::span<const TensorType> in) const {
  return {plain_type(DType::f32, in[kX].dims().first(static_cast<size_t>(in[kX].rank() - 1)))};
}

Cost RmsNorm::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  const double elements = static_cast<double>(in[kX].num_elements(symbols));
  return {(pass == Pass::backward ? 9 : 4) * elements, traffic_bytes(*this, pass, in, out, symbols)};
}

void RmsNorm::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &weight = in[kWeight];
  const size_t hidden = static_cast<size_t>(x.shape.back()), rows = static_cast<size_t>(x.shape.num_rows());
  for (size_t r = 0; r < rows; ++r) {
    const double* row = &x.data[r * hidden];
    const size_t group = r * hidden % std::max<size_t>(1, weight.data.size());  // where the row's weight begins
    if (pass == Pass::backward) {
      // y_i = x_i s w_i with s = (mean(x^2) + eps)^(-1/2), so ds/dx_j = -s^3 x_j / hidden.
      const double s = in[2].data[r];
      const double* dy = &in[3].data[r * hidden];
      double dot = 0;  // sum_i dy_i w_i x_i = dL/ds
      for (size_t i = 0; i < hidden; ++i) dot += dy[i] * weight.data[group + i] * row[i];
      for (size_t i = 0; i < hidden; ++i) {
        if (!out[0].data.empty())
          out[0].data[r * hidden + i] =
              s * weight.data[group + i] * dy[i] - s * s * s * row[i] * dot / static_cast<double>(hidden);
        if (!out[1].data.empty()) out[1].data[group + i] += dy[i] * row[i] * s;
      }
      continue;
    }
    double squares = 0;
    for (size_t i = 0; i < hidden; ++i) squares += row[i] * row[i];
    const double s = 1.0 / std::sqrt(squares / static_cast<double>(hidden) + static_cast<double>(attrs_.eps));
    for (size_t i = 0; i < hidden; ++i) out[0].data[r * hidden + i] = row[i] * s * weight.data[group + i];
    if (pass == Pass::forward && !out[1].data.empty()) out[1].data[r] = s;
  }
}

std::vector<Workload> RmsNorm::workloads() {
  std::vector<Workload> rows;
  const auto op = std::make_shared<RmsNorm>(kernels::RmsNormAttrs{1e-5f});
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes()) {
      rows.push_back(
          {workload_name(model, step, "input_layernorm"),
           op,
           {TensorType(model.dtype, {Symbol::tokens, model.hidden}), TensorType(model.dtype, {model.hidden})},
           symbols_of(step)});
      if (model.qk_norm)
        rows.push_back({workload_name(model, step, "q_norm"),
                        op,
                        {TensorType(model.dtype, {Symbol::tokens, model.heads, model.head_dim}),
                         TensorType(model.dtype, {model.head_dim})},
                        symbols_of(step)});
    }
  // Groups of a state-space layer, as in Nemotron-H.
  for (const StepShape& step : step_shapes())
    rows.push_back({workload_name("nemotron-3-nano-30b", step, "norm of groups"),
                    op,
                    {TensorType(DType::f32, {Symbol::tokens, 8, 512}), TensorType(DType::f32, {8, 512})},
                    symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
