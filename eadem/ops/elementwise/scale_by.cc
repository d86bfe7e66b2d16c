// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/elementwise/scale_by.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

std::vector<Port> ScaleBy::inputs() const {
  std::vector<Port> ports = {{"x"}, {"scale", Port::Role::parameter}};
  if (attrs_.indexed) ports.push_back({"index", Port::Role::index});
  return ports;
}

std::vector<TensorType> ScaleBy::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  expect_rank(name(), "scale", in[kScale], 1);
  expect_dtype(name(), "scale", in[kScale], kF32);
  expect_plain(name(), "scale", in[kScale]);
  if (attrs_.indexed) {
    expect_dtype(name(), "index", in[kIndex], kI32);
    expect_same_dims(name(), "index", in[kIndex], in[kX], "x");
  } else {
    expect_dim(name(), "scale", in[kScale], 0, 1, "there is no index");
  }
  return {plain_type(in[kX].dtype, in[kX].dims())};
}

DType ScaleBy::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kX) return in[kX].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return port == kScale ? DType::f32 : DType::i32;
}

std::vector<Sharding> ScaleBy::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "scale", in[kScale], "every element may need any of it");
  if (in[kX].sharding.kind == Sharding::Kind::partial || (attrs_.indexed && !(in[kX].sharding == in[kIndex].sharding)))
    throw InvalidArgument("scale_by: 'x' is {}; expected whole sums, divided as the index", to_string(in[kX]));
  return {in[kX].sharding};
}

std::vector<Saved> ScaleBy::saved() const {
  std::vector<Saved> saved = {{Saved::Kind::input, kX}, {Saved::Kind::input, kScale}};
  if (attrs_.indexed) saved.push_back({Saved::Kind::input, kIndex});
  return saved;
}

Cost ScaleBy::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                   const SymbolValues& symbols) const {
  return {(pass == Pass::backward ? 3 : 1) * static_cast<double>(in[kX].num_elements(symbols)),
          traffic_bytes(*this, pass, in, out, symbols)};
}

void ScaleBy::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &scale = in[kScale];
  for (size_t i = 0; i < x.data.size(); ++i) {
    const size_t j = attrs_.indexed ? static_cast<size_t>(in[kIndex].data[i]) : 0;
    if (pass != Pass::backward) {
      out[0].data[i] = x.data[i] * scale.data[j];
      continue;
    }
    const double dy = in.back().data[i];
    if (!out[0].data.empty()) out[0].data[i] = dy * scale.data[j];
    if (!out[1].data.empty()) out[1].data[j] += dy * x.data[i];
  }
}

std::vector<Workload> ScaleBy::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "layer_scalar"),
                      std::make_shared<ScaleBy>(kernels::ScaleByAttrs{}),
                      {TensorType(model.dtype, {Symbol::tokens, model.hidden}), TensorType(DType::f32, {1})},
                      symbols_of(step)});
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "scales of experts"),
                      std::make_shared<ScaleBy>(kernels::ScaleByAttrs{.indexed = true}),
                      {TensorType(DType::f32, {Symbol::tokens, model.top_k}), TensorType(DType::f32, {model.experts}),
                       TensorType(DType::i32, {Symbol::tokens, model.top_k})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
