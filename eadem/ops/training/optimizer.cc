// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/training/optimizer.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

GradNorm::GradNorm(int num_inputs, bool of_parts) : of_parts_(of_parts) {
  if (num_inputs <= 0) throw InvalidArgument("grad_norm: {} inputs; expected at least 1", num_inputs);
  for (int i = 0; i < num_inputs; ++i) port_names_.push_back("grad" + std::to_string(i));
}

std::vector<Port> GradNorm::inputs() const {
  std::vector<Port> ports;
  for (const std::string& port_name : port_names_) ports.push_back({port_name, Port::Role::constant});
  return ports;
}
std::vector<Port> GradNorm::outputs() const { return {{"norm", Port::Role::constant}}; }

AttrsRef GradNorm::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::string GradNorm::attrs_text() const { return fmt::format("inputs={}", port_names_.size()); }

std::vector<TensorType> GradNorm::infer_types(std::span<const TensorType> in) const {
  for (size_t i = 0; i < port_names_.size(); ++i) {
    expect_dtype(name(), port_names_[i], in[i], kF32);
    expect_plain(name(), port_names_[i], in[i]);
  }
  return {TensorType(DType::f32, {1})};
}

Sharding GradNorm::wanted_sharding(std::span<const TensorType> in, int port) const {
  const Sharding& has = in[static_cast<size_t>(port)].sharding;
  return of_parts_ && has.kind == Sharding::Kind::sharded ? has : Sharding::replicated();
}

std::vector<Sharding> GradNorm::infer_sharding(std::span<const TensorType> in) const {
  const auto is_whole = [](const TensorType& type) { return type.sharding == Sharding::replicated(); };
  if (of_parts_ && std::all_of(in.begin(), in.end(), is_whole))
    return {Sharding::replicated()};  // parts over another axis
  for (size_t i = 0; i < port_names_.size(); ++i) {
    if (!of_parts_) expect_replicated(name(), port_names_[i], in[i], "the norm is of whole gradients");
    if (of_parts_ && in[i].sharding.kind != Sharding::Kind::sharded)
      throw InvalidArgument("grad_norm: '{}' is {}; expected a part, as every rank would count a whole one",
                            port_names_[i], to_string(in[i]));
  }
  return {of_parts_ ? Sharding::along(0) : Sharding::replicated()};
}

Cost GradNorm::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                    const SymbolValues& symbols) const {
  double elements = 0;
  for (const TensorType& type : in) elements += static_cast<double>(type.num_elements(symbols));
  return {2 * elements, traffic_bytes(in, out, symbols)};
}

void GradNorm::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  double squares = 0;
  for (const RefTensor& gradient : in)
    for (double value : gradient.data) squares += value * value;
  out[0].data[0] = std::sqrt(squares);
}

std::vector<Workload> GradNorm::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    rows.push_back(
        {fmt::format("{} one mlp", model.name),
         std::make_shared<GradNorm>(3),
         {TensorType(DType::f32, {model.ffn, model.hidden}), TensorType(DType::f32, {model.ffn, model.hidden}),
          TensorType(DType::f32, {model.hidden, model.ffn})},
         {}});
  return rows;
}

std::vector<Port> AdamW::inputs() const {
  using enum Port::Role;
  return {{"grad", constant},
          {"norm", constant},
          {"hyper", constant},
          {"master", state},
          {"m", state},
          {"v", state},
          {"weight", state, /*optional=*/true}};
}
std::vector<Port> AdamW::outputs() const {
  using enum Port::Role;
  return {{"master", state}, {"m", state}, {"v", state}, {"weight", state, /*optional=*/true}};
}

std::string AdamW::attrs_text() const { return fmt::format("decay={}", attrs_.decay); }

std::vector<TensorType> AdamW::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name(), "grad", in[kGrad], kF32);
  expect_plain(name(), "grad", in[kGrad]);
  expect_dtype(name(), "norm", in[kNorm], kF32);
  expect_rank(name(), "norm", in[kNorm], 1);
  expect_dim(name(), "norm", in[kNorm], 0, Dim(1), "one number");
  expect_dtype(name(), "hyper", in[kHyper], kF32);
  expect_rank(name(), "hyper", in[kHyper], 1);
  expect_dim(name(), "hyper", in[kHyper], 0, Dim(8), "the hyperparameters of one step");
  const std::vector<Port> ports = inputs();
  std::vector<TensorType> out;
  for (size_t i = kMaster; i <= kV; ++i) {
    expect_dtype(name(), ports[i].name, in[i], kF32);
    expect_same_dims(name(), ports[i].name, in[i], in[kGrad], "grad");
    out.push_back(plain_type(DType::f32, in[i].dims()));
  }
  if (kernels::is_unconnected(in[kWeight])) {
    out.push_back(kernels::unconnected_port());
  } else {
    constexpr DType kHalves[] = {DType::bf16, DType::f16};
    expect_dtype(name(), "weight", in[kWeight], kHalves);
    expect_plain(name(), "weight", in[kWeight]);
    expect_same_dims(name(), "weight", in[kWeight], in[kGrad], "grad");
    out.push_back(plain_type(in[kWeight].dtype, in[kWeight].dims()));
  }
  return out;
}

std::vector<Sharding> AdamW::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "norm", in[kNorm], "one number for all ranks");
  expect_replicated(name(), "hyper", in[kHyper], "the same for all ranks");
  const Sharding& grad = in[kGrad].sharding;
  if (grad.kind == Sharding::Kind::partial)
    throw InvalidArgument("adamw: 'grad' is partial sums; an all_reduce must come first");
  const std::vector<Port> ports = inputs();
  for (size_t i = kMaster; i <= kWeight; ++i)
    if (!kernels::is_unconnected(in[i]) && !(in[i].sharding == grad))
      throw InvalidArgument("adamw: '{}' is {} but 'grad' is {}; expected both divided alike", ports[i].name,
                            to_string(in[i].sharding), to_string(grad));
  return {grad, grad, grad, kernels::is_unconnected(in[kWeight]) ? Sharding::replicated() : grad};
}

Cost AdamW::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                 const SymbolValues& symbols) const {
  // The rounded weight is written, not read.
  return {16 * static_cast<double>(in[kGrad].num_elements(symbols)), traffic_bytes(in.first(kWeight), out, symbols)};
}

void AdamW::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const std::vector<double>& hyper = in[kHyper].data;
  const double beta1 = hyper[kernels::kHyperBeta1], beta2 = hyper[kernels::kHyperBeta2],
               max_norm = hyper[kernels::kHyperMaxNorm];
  const double clip = max_norm > 0 ? std::min(1.0, max_norm / (in[kNorm].data[0] + 1e-6)) : 1.0;
  for (size_t i = 0; i < in[kGrad].data.size(); ++i) {
    const double g = in[kGrad].data[i] * clip;
    const double m = beta1 * in[kM].data[i] + (1 - beta1) * g;
    const double v = beta2 * in[kV].data[i] + (1 - beta2) * g * g;
    const double step = m / hyper[kernels::kHyperBiasCorrection1] /
                        (std::sqrt(v / hyper[kernels::kHyperBiasCorrection2]) + hyper[kernels::kHyperEps]);
    const double decay = attrs_.decay ? hyper[kernels::kHyperWeightDecay] * in[kMaster].data[i] : 0;
    const double master = in[kMaster].data[i] - hyper[kernels::kHyperLearningRate] * (step + decay);
    out[0].data[i] = master;
    out[1].data[i] = m;
    out[2].data[i] = v;
    if (!out[3].data.empty()) out[3].data[i] = master;
  }
}

std::vector<Workload> AdamW::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes()) {
    const TensorType f32(DType::f32, {model.ffn, model.hidden});
    rows.push_back({fmt::format("{} up_proj", model.name),
                    std::make_shared<AdamW>(kernels::AdamWAttrs{}),
                    {f32, TensorType(DType::f32, {1}), TensorType(DType::f32, {8}), f32, f32, f32,
                     model.dtype == DType::f32 ? kernels::unconnected_port() : f32.with_dtype(model.dtype)},
                    {}});
  }
  return rows;
}

}  // namespace eadem::ops
