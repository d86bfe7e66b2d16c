// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/expert_order.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

ExpertOrder::ExpertOrder(const kernels::ExpertOrderAttrs& attrs) : attrs_(attrs) {
  if (attrs.experts < 1 || attrs.identities < 0)
    throw InvalidArgument("expert_order: experts is {} and identities is {}; expected at least 1, and at least 0",
                          attrs.experts, attrs.identities);
}

std::string ExpertOrder::attrs_text() const {
  const std::string text = fmt::format("experts={}", attrs_.experts);
  return attrs_.identities == 0 ? text : fmt::format("{} identities={}", text, attrs_.identities);
}

std::vector<TensorType> ExpertOrder::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "experts", in[0], 2);
  expect_dtype(name(), "experts", in[0], kI32);
  return {plain_type(DType::i32, in[0].dims()), TensorType(DType::i32, {attrs_.experts + 1})};
}

std::vector<Sharding> ExpertOrder::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "experts", in[0], "an order has all pairs");
  return {Sharding::replicated(), Sharding::replicated()};
}

Cost ExpertOrder::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                       const SymbolValues& symbols) const {
  return {0, traffic_bytes(*this, pass, in, out, symbols)};
}

void ExpertOrder::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const std::vector<double>& experts = in[0].data;
  double row = 0;
  for (int64_t e = 0; e < attrs_.experts; ++e) {
    out[1].data[static_cast<size_t>(e)] = row;
    for (size_t pair = 0; pair < experts.size(); ++pair)
      if (experts[pair] == static_cast<double>(e)) out[0].data[pair] = row++;
  }
  out[1].data.back() = row;
  for (size_t pair = 0; pair < experts.size(); ++pair)
    if (experts[pair] >= static_cast<double>(attrs_.experts)) out[0].data[pair] = row++;
}

std::vector<Workload> ExpertOrder::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "expert_order"),
                      std::make_shared<ExpertOrder>(kernels::ExpertOrderAttrs{model.experts}),
                      {TensorType(DType::i32, {Symbol::tokens, model.top_k})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
