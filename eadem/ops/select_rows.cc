// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/select_rows.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

AttrsRef SelectRows::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> SelectRows::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 2);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_rank(name(), "rows", in[1], 1);
  expect_dtype(name(), "rows", in[1], kI32);
  return {TensorType(in[0].dtype, {in[1].dim(0), in[0].dim(1)})};
}

std::vector<Sharding> SelectRows::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "rows", in[1], "every rank selects the same rows");
  const Sharding& x = in[0].sharding;
  if (!(x == Sharding::replicated()) && !(x == Sharding::along(1)))
    throw InvalidArgument("select_rows: 'x' is {}; expected replicated or sharded(1)", to_string(in[0]));
  return {x};
}

Cost SelectRows::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                      const SymbolValues& symbols) const {
  return {0, static_cast<double>(2 * out[0].size_bytes(symbols) + in[1].size_bytes(symbols))};
}

void SelectRows::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const size_t hidden = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < static_cast<size_t>(in[1].shape[0]); ++r)
    for (size_t h = 0; h < hidden; ++h)
      out[0].data[r * hidden + h] = in[0].data[static_cast<size_t>(in[1].data[r]) * hidden + h];
}

std::vector<Workload> SelectRows::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back(
          {workload_name(model, step, "select_rows"),
           std::make_shared<SelectRows>(),
           {TensorType(model.dtype, {Symbol::tokens, model.hidden}), TensorType(DType::i32, {Symbol::logit_rows})},
           symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
