// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/head_linear.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

HeadLinear::HeadLinear(const kernels::HeadLinearAttrs& attrs) : attrs_(attrs) {
  if (attrs.out_dtype != DType::f32 && attrs.out_dtype != DType::bf16)
    throw InvalidArgument("head_linear: out_dtype is {}; expected f32 or bf16", dtype_name(attrs.out_dtype));
}

std::vector<TensorType> HeadLinear::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[kX], 3);
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  expect_rank(name(), "weight", in[kWeight], 3);
  expect_dtype(name(), "weight", in[kWeight], kFloats);
  expect_dim(name(), "weight", in[kWeight], 0, in[kX].dim(1), "heads of 'x'");
  expect_dim(name(), "weight", in[kWeight], 2, in[kX].dim(2), "last dimension of 'x'");
  return {TensorType(attrs_.out_dtype, {in[kX].dim(0), in[kX].dim(1), in[kWeight].dim(1)})};
}

std::vector<Sharding> HeadLinear::infer_sharding(std::span<const TensorType> in) const {
  const Sharding &x = in[kX].sharding, &weight = in[kWeight].sharding;
  if (x == Sharding::replicated() && weight == Sharding::replicated()) return {Sharding::replicated()};
  if (x == Sharding::along(1) && weight == Sharding::along(0)) return {x};
  throw InvalidArgument(
      "head_linear: 'x' is {} and 'weight' is {}; expected both replicated, or sharded(1) with sharded(0), the heads",
      to_string(x), to_string(weight));
}

Cost HeadLinear::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                      const SymbolValues& symbols) const {
  const double product = 2 * static_cast<double>(out[0].num_elements(symbols)) * static_cast<double>(in[kX].fixed(2));
  return {(pass == Pass::backward ? 2 : 1) * product, traffic_bytes(*this, pass, in, out, symbols)};
}

void HeadLinear::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &weight = in[kWeight];
  const bool backward = pass == Pass::backward;
  const auto tokens = static_cast<size_t>(x.shape[0]), heads = static_cast<size_t>(weight.shape[0]),
             outputs = static_cast<size_t>(weight.shape[1]), width = static_cast<size_t>(weight.shape[2]);
  if (backward)
    for (double& value : out[0].data) value = 0;
  for (size_t row = 0; row < tokens * heads; ++row)
    for (size_t n = 0; n < outputs; ++n) {
      const size_t w = (row % heads * outputs + n) * width;
      double sum = 0;
      for (size_t k = 0; k < width; ++k) {
        if (!backward) {
          sum += x.data[row * width + k] * weight.data[w + k];
          continue;
        }
        const double dy = in[2].data[row * outputs + n];
        if (!out[0].data.empty()) out[0].data[row * width + k] += dy * weight.data[w + k];
        if (!out[1].data.empty()) out[1].data[w + k] += dy * x.data[row * width + k];
      }
      if (!backward) out[0].data[row * outputs + n] = sum;
    }
}

std::vector<Workload> HeadLinear::workloads() {
  std::vector<Workload> rows;
  for (const LatentShape& model : latent_shapes())
    for (const StepShape& step : step_shapes()) {
      const auto add = [&](std::string_view part, int64_t width, int64_t outputs) {
        rows.push_back({workload_name(model.name, step, part),
                        std::make_shared<HeadLinear>(kernels::HeadLinearAttrs{model.dtype}),
                        {TensorType(model.dtype, {Symbol::tokens, model.heads, width}),
                         TensorType(model.dtype, {model.heads, outputs, width})},
                        symbols_of(step)});
      };
      add("k_b_proj", model.nope, model.latent);
      add("v_b_proj", model.latent, model.value);
    }
  return rows;
}

}  // namespace eadem::ops
