// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/all_reduce.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef AllReduce::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> AllReduce::infer_types(std::span<const TensorType> in) const {
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  return {plain_type(in[0].dtype, in[0].dims())};
}

std::vector<Sharding> AllReduce::infer_sharding(std::span<const TensorType> in) const {
  if (in[0].sharding.kind != Sharding::Kind::partial)
    throw InvalidArgument("all_reduce: 'x' is {}; expected partial", to_string(in[0].sharding));
  return {Sharding::replicated()};
}

Cost AllReduce::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  if (pass == Pass::backward) return {};
  return {0, traffic_bytes(*this, pass, in, out, symbols)};
}

void AllReduce::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  for (size_t i = 0; i < out[0].data.size(); ++i) out[0].data[i] = in[0].data[i];
}

std::vector<Workload> AllReduce::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "all_reduce"),
                      std::make_shared<AllReduce>(),
                      {TensorType(model.dtype, {Symbol::tokens, model.hidden})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
