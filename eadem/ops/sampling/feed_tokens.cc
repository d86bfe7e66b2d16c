// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/sampling/feed_tokens.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef FeedTokens::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> FeedTokens::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "ids", in[0], 1);
  expect_dtype(name(), "ids", in[0], kI32);
  expect_rank(name(), "sampled", in[1], 1);
  expect_dtype(name(), "sampled", in[1], kI32);
  return {in[0]};
}

std::vector<Sharding> FeedTokens::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "ids", in[0], "every rank has all tokens");
  expect_replicated(name(), "sampled", in[1], "every rank has all tokens");
  return {Sharding::replicated()};
}

Cost FeedTokens::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                      const SymbolValues& symbols) const {
  return {0, static_cast<double>(in[0].size_bytes(symbols) + in[1].size_bytes(symbols) + out[0].size_bytes(symbols))};
}

void FeedTokens::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  for (size_t t = 0; t < out[0].data.size(); ++t) {
    const double id = in[0].data[t];
    out[0].data[t] = id < 0 ? std::max(in[1].data[static_cast<size_t>(-1 - id)], 0.0) : id;
  }
}

std::vector<Workload> FeedTokens::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "feed_tokens"),
                      std::make_shared<FeedTokens>(),
                      {TensorType(DType::i32, {Symbol::tokens}), TensorType(DType::i32, {Symbol::logit_rows})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
