// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/elementwise/elementwise.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::ActivationKind;

namespace {

// f(x) and f'(x) from their definitions (kernels/elementwise.h).
struct ValueAndSlope {
  double value, slope;
};

ValueAndSlope activate(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::silu: {
      const double sigmoid = 1 / (1 + std::exp(-x));
      return {x * sigmoid, sigmoid + x * sigmoid * (1 - sigmoid)};
    }
    case ActivationKind::gelu: {
      const double cdf = 0.5 * std::erfc(-x / std::numbers::sqrt2);
      const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
      return {x * cdf, cdf + x * density};
    }
    case ActivationKind::gelu_tanh: {
      // (1 + tanh u) / 2 written as 1 / (1 + exp(-2u)): near tanh = -1 the sum cancels even in double.
      const double c = std::sqrt(2 / std::numbers::pi);
      const double gate = 1 / (1 + std::exp(-2 * c * (x + 0.044715 * x * x * x)));
      return {x * gate, gate + 2 * x * gate * (1 - gate) * c * (1 + 3 * 0.044715 * x * x)};
    }
    case ActivationKind::relu: return {x > 0 ? x : 0, x > 0 ? 1.0 : 0.0};
    case ActivationKind::relu2: return {x > 0 ? x * x : 0, x > 0 ? 2 * x : 0};
    case ActivationKind::sigmoid: return {1 / (1 + std::exp(-x)), 1 / ((1 + std::exp(-x)) * (1 + std::exp(x)))};
  }
  return {};
}

double activation_flops(ActivationKind kind, double transcendental) {
  switch (kind) {
    case ActivationKind::silu: return transcendental + 2;
    case ActivationKind::gelu: return transcendental + 3;
    case ActivationKind::gelu_tanh: return transcendental + 7;
    case ActivationKind::relu: return 1;
    case ActivationKind::relu2: return 2;
    case ActivationKind::sigmoid: return transcendental + 1;
  }
  return 0;
}

std::vector<Workload> rows_of(const OpPtr& op, int num_inputs, std::string_view part, int64_t ModelShape::*width) {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, part), op,
                      std::vector<TensorType>(static_cast<size_t>(num_inputs),
                                              TensorType(model.dtype, {Symbol::tokens, model.*width})),
                      symbols_of(step)});
  return rows;
}

}  // namespace

std::string_view activation_name(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::silu: return "silu";
    case ActivationKind::gelu: return "gelu";
    case ActivationKind::gelu_tanh: return "gelu_tanh";
    case ActivationKind::relu: return "relu";
    case ActivationKind::relu2: return "relu2";
    case ActivationKind::sigmoid: return "sigmoid";
  }
  return "?";
}

AttrsRef ElementwiseOp::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> ElementwiseOp::infer_types(std::span<const TensorType> in) const {
  const std::vector<Port> ports = inputs();
  for (size_t i = 0; i < ports.size(); ++i) {
    expect_dtype(name(), ports[i].name, in[i], kActivations);
    expect_plain(name(), ports[i].name, in[i]);
    if (i == 0) continue;
    expect_same_dims(name(), ports[i].name, in[i], in[0], ports[0].name);
    const DType first[] = {in[0].dtype};
    expect_dtype(name(), ports[i].name, in[i], first);
  }
  return {plain_type(in[0].dtype, in[0].dims())};
}

DType ElementwiseOp::wanted_dtype(std::span<const TensorType> in, int /*port*/) const {
  return in[0].dtype == DType::f16 ? DType::f32 : in[0].dtype;
}

Cost ElementwiseOp::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                         const SymbolValues& symbols) const {
  const double bytes =
      pass == Pass::backward && passes_gradient_through() ? 0 : traffic_bytes(*this, pass, in, out, symbols);
  return {flops_per_element(pass) * static_cast<double>(in[0].num_elements(symbols)), bytes};
}

void Add::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) {
    for (RefTensor& gradient : out)
      for (size_t i = 0; i < gradient.data.size(); ++i) gradient.data[i] = in[0].data[i];
    return;
  }
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = in[0].data[i] + in[1].data[i];
}

std::vector<Workload> Add::workloads() { return rows_of(std::make_shared<Add>(), 2, "residual", &ModelShape::hidden); }

void Mul::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &a = in[0], &b = in[1];
  if (pass == Pass::backward) {
    for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = in[2].data[i] * b.data[i];
    for (size_t i = 0; i < out[1].data.size(); ++i) out[1].data[i] = in[2].data[i] * a.data[i];
    return;
  }
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = a.data[i] * b.data[i];
}

std::vector<Workload> Mul::workloads() { return rows_of(std::make_shared<Mul>(), 2, "gate", &ModelShape::ffn); }

Scale::Scale(const kernels::ScaleAttrs& attrs) : attrs_(attrs) {
  if (!std::isfinite(attrs.factor))
    throw InvalidArgument("scale: factor is {}; expected a finite number", attrs.factor);
  if (!std::isfinite(attrs.softcap) || attrs.softcap < 0)
    throw InvalidArgument("scale: softcap is {}; expected 0 (none) or a finite number above", attrs.softcap);
  if (!std::isfinite(attrs.limit) || attrs.limit < 0 || (attrs.limit > 0 && attrs.softcap > 0))
    throw InvalidArgument("scale: limit is {}; expected 0 (none) or a finite number above, without a softcap",
                          attrs.limit);
}

std::string Scale::attrs_text() const {
  return fmt::format("factor={}{}{}", attrs_.factor,
                     attrs_.softcap > 0 ? fmt::format(" softcap={}", attrs_.softcap) : "",
                     attrs_.limit > 0 ? fmt::format(" limit={}", attrs_.limit) : "");
}

void Scale::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const double factor = static_cast<double>(attrs_.factor), cap = static_cast<double>(attrs_.softcap);
  const double limit = attrs_.limit > 0 ? static_cast<double>(attrs_.limit) : HUGE_VAL;
  for (size_t i = 0; i < out[0].data.size(); ++i) {
    const double scaled = factor * in[0].data[i], t = cap > 0 ? std::tanh(scaled / cap) : 0;
    const double y = cap > 0 ? cap * t : std::clamp(scaled, -limit, limit);
    const double slope = std::abs(scaled) > limit ? 0 : factor * (1 - t * t);
    out[0].data[i] = pass == Pass::backward ? in[1].data[i] * slope : y;
  }
}

double Scale::flops_per_element(Pass pass) const {
  if (attrs_.limit > 0) return 3;
  return attrs_.softcap > 0 ? 2 * kTranscendentalFlops + (pass == Pass::backward ? 5 : 3) : 1;
}

std::vector<Workload> Scale::workloads() {
  std::vector<Workload> rows =
      rows_of(std::make_shared<Scale>(kernels::ScaleAttrs{0.22f}), 1, "residual multiplier", &ModelShape::hidden);
  const auto cap = std::make_shared<Scale>(kernels::ScaleAttrs{1.0f, 30.0f});
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "logits with a soft cap"),
                      cap,
                      {TensorType(DType::f32, {Symbol::logit_rows, model.vocab})},
                      symbols_of(step)});
  return rows;
}

std::string Activation::attrs_text() const { return std::string(activation_name(attrs_.kind)); }

void Activation::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  for (size_t i = 0; i < out[0].data.size(); ++i) {
    const ValueAndSlope f = activate(attrs_.kind, in[0].data[i]);
    out[0].data[i] = pass == Pass::backward ? in[1].data[i] * f.slope : f.value;
  }
}

double Activation::flops_per_element(Pass pass) const {
  return activation_flops(attrs_.kind, kTranscendentalFlops) + (pass == Pass::backward ? 4 : 0);
}

std::vector<Workload> Activation::workloads() {
  return rows_of(std::make_shared<Activation>(kernels::ActivationAttrs{ActivationKind::gelu_tanh}), 1, "gelu_tanh",
                 &ModelShape::ffn);
}

std::string GatedActivation::attrs_text() const { return std::string(activation_name(attrs_.kind)); }

void GatedActivation::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &gate = in[0], &up = in[1];
  for (size_t i = 0; i < gate.data.size(); ++i) {
    const ValueAndSlope f = activate(attrs_.kind, gate.data[i]);
    if (pass != Pass::backward) {
      out[0].data[i] = f.value * up.data[i];
      continue;
    }
    const double dy = in[2].data[i];
    if (!out[0].data.empty()) out[0].data[i] = dy * up.data[i] * f.slope;
    if (!out[1].data.empty()) out[1].data[i] = dy * f.value;
  }
}

double GatedActivation::flops_per_element(Pass pass) const {
  return activation_flops(attrs_.kind, kTranscendentalFlops) + (pass == Pass::backward ? 6 : 1);
}

std::vector<Workload> GatedActivation::workloads() {
  return rows_of(std::make_shared<GatedActivation>(kernels::ActivationAttrs{ActivationKind::silu}), 2, "swiglu",
                 &ModelShape::ffn);
}

Cast::Cast(const kernels::CastAttrs& attrs) : attrs_(attrs) {
  if (std::find(std::begin(kFloats), std::end(kFloats), attrs.to) == std::end(kFloats))
    throw InvalidArgument("cast: target is {}; expected f32, bf16 or f16", dtype_name(attrs.to));
}

std::string Cast::attrs_text() const { return fmt::format("to={}", dtype_name(attrs_.to)); }

std::vector<TensorType> Cast::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name(), "x", in[0], kFloats);
  expect_plain(name(), "x", in[0]);
  return {plain_type(attrs_.to, in[0].dims())};
}

DType Cast::wanted_dtype(std::span<const TensorType> in, int port) const { return Op::wanted_dtype(in, port); }

void Cast::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = in[0].data[i];
}

std::vector<Workload> Cast::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "logits to f32"),
                      std::make_shared<Cast>(kernels::CastAttrs{DType::f32}),
                      {TensorType(DType::bf16, {Symbol::logit_rows, model.vocab})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
