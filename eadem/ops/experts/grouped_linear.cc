// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/experts/grouped_linear.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

GroupedLinear::GroupedLinear(const kernels::GroupedLinearAttrs& attrs) : attrs_(attrs) {
  if (attrs.out_dtype != DType::f32 && attrs.out_dtype != DType::bf16)
    throw InvalidArgument("grouped_linear: out_dtype is {}; expected f32 or bf16", dtype_name(attrs.out_dtype));
}

std::vector<TensorType> GroupedLinear::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[kX], 2);
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_rank(name(), "weight", in[kWeight], 3);
  expect_dtype(name(), "weight", in[kWeight], kFloats);
  expect_dim(name(), "weight", in[kWeight], 2, in[kX].dim(1), "last dimension of 'x'");
  expect_rank(name(), "offsets", in[kOffsets], 1);
  expect_dtype(name(), "offsets", in[kOffsets], kI32);
  expect_dim(name(), "offsets", in[kOffsets], 0, in[kWeight].dim(0) + 1, "experts of 'weight', and one");
  if (!kernels::is_unconnected(in[kBias])) {
    expect_rank(name(), "bias", in[kBias], 2);
    expect_dtype(name(), "bias", in[kBias], kFloats);
    expect_plain(name(), "bias", in[kBias]);
    for (int axis : {0, 1})
      expect_dim(name(), "bias", in[kBias], axis, in[kWeight].dim(axis), "experts and outputs of 'weight'");
  }
  return {TensorType(attrs_.out_dtype, {in[kX].dim(0), in[kWeight].dim(1)})};
}

Sharding GroupedLinear::wanted_sharding(std::span<const TensorType> in, int port) const {
  if (port != kX) return Op::wanted_sharding(in, port);
  if (in[kWeight].sharding == Sharding::along(0)) return in[kX].sharding;
  const bool divided_alike = in[kX].sharding == Sharding::along(1) && in[kWeight].sharding == Sharding::along(2);
  return divided_alike ? in[kX].sharding : Sharding::replicated();
}

std::vector<Sharding> GroupedLinear::infer_sharding(std::span<const TensorType> in) const {
  if (in[kWeight].sharding == Sharding::along(0)) {
    for (size_t port : {size_t{kX}, size_t{kOffsets}, size_t{kBias}})
      if (!kernels::is_unconnected(in[port]) && !(in[port].sharding == Sharding::along(0)))
        throw InvalidArgument(
            "grouped_linear: 'weight' is sharded(0) and '{}' {}; expected those of this rank's experts",
            inputs()[port].name, to_string(in[port].sharding));
    return {Sharding::along(0)};
  }
  expect_replicated(name(), "offsets", in[kOffsets], "every rank has the rows of every expert");
  const Sharding &x = in[kX].sharding, &weight = in[kWeight].sharding;
  const bool has_bias = !kernels::is_unconnected(in[kBias]), is_partial = weight == Sharding::along(2);
  if (has_bias && (is_partial || !(in[kBias].sharding == weight)))
    throw InvalidArgument("grouped_linear: 'weight' is {} and 'bias' {}; {}", to_string(weight),
                          to_string(in[kBias].sharding),
                          is_partial ? "every rank would add the bias" : "expected both divided alike");
  if (x == Sharding::replicated() && weight == Sharding::replicated()) return {Sharding::replicated()};
  if (x == Sharding::replicated() && weight == Sharding::along(1)) return {Sharding::along(1, weight.whole)};
  if (x == Sharding::along(1) && weight == Sharding::along(2)) return {Sharding::partial()};
  throw InvalidArgument(
      "grouped_linear: 'x' is {} and 'weight' is {}; expected replicated with replicated or sharded(1), or sharded(1) "
      "with sharded(2)",
      to_string(x), to_string(weight));
}

Cost GroupedLinear::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                         const SymbolValues& symbols) const {
  const double product = 2 * static_cast<double>(out[0].num_elements(symbols)) * static_cast<double>(in[kX].fixed(1));
  const double rows = static_cast<double>(in[kX].dim(0).bind(symbols)),
               experts = static_cast<double>(in[kWeight].fixed(0));
  const double idle = std::max(0.0, 1 - rows / experts);  // of the experts, at least
  double unread = idle * static_cast<double>(in[kWeight].size_bytes(symbols));
  if (pass == Pass::backward)  // nor are their gradients, in f32, read and written
    unread += idle * 2 * static_cast<double>(sizeof(float)) * static_cast<double>(in[kWeight].num_elements(symbols));
  return {(pass == Pass::backward ? 2 : 1) * product, traffic_bytes(*this, pass, in, out, symbols) - unread};
}

void GroupedLinear::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &weight = in[kWeight], &offsets = in[kOffsets];
  const bool backward = pass == Pass::backward;
  const auto experts = static_cast<size_t>(weight.shape[0]), outputs = static_cast<size_t>(weight.shape[1]),
             width = static_cast<size_t>(weight.shape[2]);
  std::fill(out[0].data.begin(), out[0].data.end(), 0.0);  // rows of no expert stay 0
  for (size_t e = 0; e < experts; ++e)
    for (auto r = static_cast<size_t>(offsets.data[e]); r < static_cast<size_t>(offsets.data[e + 1]); ++r)
      for (size_t n = 0; n < outputs; ++n) {
        const size_t w = (e * outputs + n) * width;
        double sum = backward || in[kBias].data.empty() ? 0 : in[kBias].data[e * outputs + n];
        if (backward && !out[2].data.empty()) out[2].data[e * outputs + n] += in[kOffsets + 1].data[r * outputs + n];
        for (size_t k = 0; k < width; ++k) {
          if (!backward) {
            sum += x.data[r * width + k] * weight.data[w + k];
            continue;
          }
          const double dy = in[kOffsets + 1].data[r * outputs + n];
          if (!out[0].data.empty()) out[0].data[r * width + k] += dy * weight.data[w + k];
          if (!out[1].data.empty()) out[1].data[w + k] += dy * x.data[r * width + k];
        }
        if (!backward) out[0].data[r * outputs + n] = sum;
      }
}

std::vector<Workload> GroupedLinear::workloads() {
  std::vector<Workload> rows;
  for (const ExpertShape& model : expert_shapes())
    for (const StepShape& step : step_shapes()) {
      const auto add = [&](std::string_view part, int64_t width, int64_t outputs) {
        rows.push_back(
            {workload_name(model.name, step, part),
             std::make_shared<GroupedLinear>(kernels::GroupedLinearAttrs{model.dtype}),
             {TensorType(model.dtype, {model.top_k * Dim(Symbol::tokens), width}),
              TensorType(model.dtype, {model.experts, outputs, width}), TensorType(DType::i32, {model.experts + 1}),
              model.bias ? TensorType(model.dtype, {model.experts, outputs}) : kernels::unconnected_port()},
             symbols_of(step)});
      };
      add("experts up_proj", model.hidden, model.ffn);
      add("experts down_proj", model.ffn, model.hidden);
    }
  return rows;
}

}  // namespace eadem::ops
