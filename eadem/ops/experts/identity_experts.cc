// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/identity_experts.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

IdentityExperts::IdentityExperts(const kernels::IdentityExpertsAttrs& attrs) : attrs_(attrs) {
  if (attrs.first < 0) throw InvalidArgument("identity_experts: first is {}; expected at least 0", attrs.first);
}

std::vector<TensorType> IdentityExperts::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[kX], 2);
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  expect_rank(name(), "experts", in[kExperts], 2);
  expect_dtype(name(), "experts", in[kExperts], kI32);
  expect_dim(name(), "experts", in[kExperts], 0, in[kX].dim(0), "tokens of 'x'");
  expect_rank(name(), "weights", in[kWeights], 2);
  expect_dtype(name(), "weights", in[kWeights], kF32);
  expect_plain(name(), "weights", in[kWeights]);
  expect_same_dims(name(), "weights", in[kWeights], in[kExperts], "experts");
  return {plain_type(in[kX].dtype, in[kX].dims())};
}

Cost IdentityExperts::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                           const SymbolValues& symbols) const {
  return {(pass == Pass::backward ? 3 : 1) * static_cast<double>(in[kX].num_elements(symbols)),
          traffic_bytes(*this, pass, in, out, symbols)};
}

void IdentityExperts::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool backward = pass == Pass::backward;
  const RefTensor &x = in[kX], &experts = in[kExperts], &from = in[backward ? kDy : kX];
  const auto tokens = static_cast<size_t>(x.shape[0]), hidden = static_cast<size_t>(x.shape[1]),
             top_k = static_cast<size_t>(experts.shape[1]);
  for (size_t t = 0; t < tokens; ++t) {
    double share = 0, product = 0;
    for (size_t i = t * hidden; backward && i < (t + 1) * hidden; ++i) product += x.data[i] * from.data[i];
    for (size_t j = t * top_k; j < (t + 1) * top_k; ++j) {
      const bool identity = experts.data[j] >= static_cast<double>(attrs_.first);
      if (identity) share += in[kWeights].data[j];
      if (backward && !out[1].data.empty()) out[1].data[j] = identity ? product : 0;
    }
    for (size_t i = t * hidden; i < (t + 1) * hidden && !out[0].data.empty(); ++i)
      out[0].data[i] = share * from.data[i];
  }
}

// As in LongCat-Flash.
std::vector<Workload> IdentityExperts::workloads() {
  struct ModelShape {
    const char* model;
    int64_t hidden, experts, top_k;
  };
  std::vector<Workload> rows;
  for (const ModelShape& shape : {ModelShape{"tiny", 64, 4, 3}, ModelShape{"longcat-flash", 6144, 512, 12}})
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(shape.model, step, "identity_experts"),
                      std::make_shared<IdentityExperts>(kernels::IdentityExpertsAttrs{.first = shape.experts}),
                      {TensorType(DType::f32, {Symbol::tokens, shape.hidden}),
                       TensorType(DType::i32, {Symbol::tokens, shape.top_k}),
                       TensorType(DType::f32, {Symbol::tokens, shape.top_k})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
