// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/linear.h"

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

Linear::Linear(const kernels::LinearAttrs& attrs) : attrs_(attrs) {
  if (attrs.out_dtype != DType::f32 && attrs.out_dtype != DType::bf16)
    throw InvalidArgument("linear: out_dtype is {}; expected f32 or bf16", dtype_name(attrs.out_dtype));
}

std::vector<Port> Linear::inputs() const {
  return {{"x"}, {"weight", Port::Role::parameter}, {"bias", Port::Role::parameter, /*optional=*/true}};
}
std::vector<Port> Linear::outputs() const { return {{"y"}}; }

std::string Linear::attrs_text() const {
  return fmt::format("bias={} out_dtype={}{}", attrs_.has_bias, dtype_name(attrs_.out_dtype),
                     matmul_input_text(attrs_.matmul_input));
}

std::vector<TensorType> Linear::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[kX], 2);
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_rank(name(), "weight", in[kWeight], 2);
  expect_dtype(name(), "weight", in[kWeight], kFloats);
  expect_dim(name(), "weight", in[kWeight], 1, in[kX].dim(1), "last dimension of 'x'");
  if (attrs_.has_bias) {
    expect_present(name(), "bias", in[kBias]);
    expect_rank(name(), "bias", in[kBias], 1);
    expect_dtype(name(), "bias", in[kBias], kFloats);
    expect_plain(name(), "bias", in[kBias]);
    expect_dim(name(), "bias", in[kBias], 0, in[kWeight].dim(0), "rows of 'weight'");
  } else if (!kernels::is_unconnected(in[kBias])) {
    throw InvalidArgument("linear: 'bias' is {} but the op was made with bias=false", to_string(in[kBias]));
  }
  return {TensorType(attrs_.out_dtype, {in[kX].dim(0), in[kWeight].dim(0)})};
}

std::vector<int> Linear::gradient_nodes(std::span<const TensorType> in) const {
  if (in[kWeight].encoding == nullptr) return {};
  return {0, 1, Fp8TensorEncoding::of(in[kWeight].encoding) != nullptr ? 2 : 1};
}

Sharding Linear::wanted_sharding(std::span<const TensorType> in, int port) const {
  if (port != kX) return Op::wanted_sharding(in, port);
  const bool divided_alike = in[kX].sharding == Sharding::along(1) && in[kWeight].sharding == Sharding::along(1);
  return divided_alike ? in[kX].sharding : Sharding::replicated();
}

std::vector<Sharding> Linear::infer_sharding(std::span<const TensorType> in) const {
  const Sharding &x = in[kX].sharding, &weight = in[kWeight].sharding;
  if (x == Sharding::replicated() && weight.kind != Sharding::Kind::partial && !(weight == Sharding::along(1))) {
    if (attrs_.has_bias && !(in[kBias].sharding == weight))
      throw InvalidArgument("linear: 'bias' is {}; expected {} like 'weight'", to_string(in[kBias].sharding),
                            to_string(weight));
    return {weight == Sharding::along(0) ? Sharding::along(1, weight.whole) : Sharding::replicated()};
  }
  if (x == Sharding::along(1) && weight == Sharding::along(1)) {
    if (attrs_.has_bias)
      throw InvalidArgument("linear: 'weight' is sharded(1) and 'bias' is {}; every rank would add the bias",
                            to_string(in[kBias].sharding));
    return {Sharding::partial()};
  }
  throw InvalidArgument(
      "linear: 'x' is {} and 'weight' is {}; expected replicated with replicated or sharded(0), or sharded(1) with "
      "sharded(1)",
      to_string(x), to_string(weight));
}

Cost Linear::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                  const SymbolValues& symbols) const {
  const double outputs = static_cast<double>(out[0].num_elements(symbols));
  const double product = 2 * outputs * static_cast<double>(in[kX].fixed(1));
  const double bias = attrs_.has_bias ? outputs : 0;
  return {(pass == Pass::backward ? 2 * product : product) + bias, traffic_bytes(*this, pass, in, out, symbols)};
}

void Linear::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &weight = in[kWeight];
  const size_t tokens = static_cast<size_t>(x.shape[0]), width = static_cast<size_t>(x.shape[1]),
               outputs = static_cast<size_t>(weight.shape[0]);
  if (pass == Pass::backward) {
    const RefTensor& dy = in[2];
    RefTensor &dx = out[0], &dweight = out[1], &dbias = out[2];
    for (double& value : dx.data) value = 0;
    for (size_t t = 0; t < tokens; ++t)
      for (size_t n = 0; n < outputs; ++n) {
        const double g = dy.data[t * outputs + n];
        if (!dbias.data.empty()) dbias.data[n] += g;
        for (size_t k = 0; k < width; ++k) {
          if (!dx.data.empty()) dx.data[t * width + k] += g * weight.data[n * width + k];
          if (!dweight.data.empty()) dweight.data[n * width + k] += g * x.data[t * width + k];
        }
      }
    return;
  }
  for (size_t t = 0; t < tokens; ++t)
    for (size_t n = 0; n < outputs; ++n) {
      double sum = attrs_.has_bias ? in[kBias].data[n] : 0;
      for (size_t k = 0; k < width; ++k) sum += x.data[t * width + k] * weight.data[n * width + k];
      out[0].data[t * outputs + n] = sum;
    }
}

std::vector<Workload> Linear::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes()) {
      const auto add = [&](std::string_view part, Dim tokens, int64_t width, int64_t outputs, bool bias,
                           DType out_dtype) {
        rows.push_back({workload_name(model, step, part),
                        std::make_shared<Linear>(kernels::LinearAttrs{bias, out_dtype}),
                        {TensorType(model.dtype, {tokens, width}), TensorType(model.dtype, {outputs, width}),
                         bias ? TensorType(model.dtype, {outputs}) : kernels::unconnected_port()},
                        symbols_of(step)});
      };
      const bool bias = model.qkv_bias;
      const Dim tokens = Symbol::tokens;
      add("q_proj", tokens, model.hidden, model.heads * model.head_dim, bias, model.dtype);
      add("k_proj", tokens, model.hidden, model.kv_heads * model.head_dim, bias, model.dtype);
      add("o_proj", tokens, model.heads * model.head_dim, model.hidden, false, model.dtype);
      add("up_proj", tokens, model.hidden, model.ffn, false, model.dtype);
      add("down_proj", tokens, model.ffn, model.hidden, false, model.dtype);
      add("lm_head", Symbol::logit_rows, model.hidden, model.vocab, false, DType::f32);
    }
  return rows;
}

}  // namespace eadem::ops
