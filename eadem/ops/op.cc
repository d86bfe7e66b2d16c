// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/op.h"

#include <algorithm>

#include "eadem/core/encodings/row_encoding.h"

namespace eadem::ops {

DType Op::wanted_dtype(std::span<const TensorType> inputs, int port) const {
  return inputs[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> Op::infer_sharding(std::span<const TensorType> types) const {
  const std::vector<Port> ports = inputs();
  std::optional<Sharding> common;
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].role != Port::Role::activation || kernels::is_unconnected(types[i])) continue;
    const Sharding& sharding = types[i].sharding;
    if (common && !(*common == sharding))
      throw InvalidArgument("{}: input '{}' is {}; expected {} like the other inputs", name(), ports[i].name,
                            to_string(sharding), to_string(*common));
    common = sharding;
  }
  const Sharding result = common.value_or(Sharding::replicated());
  if (result.kind == Sharding::Kind::partial)
    throw InvalidArgument("{}: inputs are partial sums; an all_reduce must come first", name());
  return std::vector<Sharding>(outputs().size(), result);
}

Sharding Op::wanted_sharding(std::span<const TensorType> types, int port) const {
  const Sharding& sharding = types[static_cast<size_t>(port)].sharding;
  return sharding.kind == Sharding::Kind::partial ? Sharding::replicated() : sharding;
}

int Op::inference_alias(int output) const {
  const std::vector<Port> out = outputs();
  if (out[static_cast<size_t>(output)].role != Port::Role::state) return -1;
  const std::vector<Port> in = inputs();
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i].role == Port::Role::state && in[i].name == out[static_cast<size_t>(output)].name)
      return static_cast<int>(i);
  EADEM_UNREACHABLE("{}: state output '{}' has no input of that name", name(), out[static_cast<size_t>(output)].name);
}

std::vector<int> Op::differentiable_inputs() const {
  std::vector<int> result;
  const std::vector<Port> ports = inputs();
  for (size_t i = 0; i < ports.size(); ++i)
    if (ports[i].role == Port::Role::activation || ports[i].role == Port::Role::parameter)
      result.push_back(static_cast<int>(i));
  return result;
}

std::vector<int> Op::gradient_outputs() const {
  std::vector<int> result = differentiable_inputs();
  std::erase_if(result, [&](int input) { return shares_gradient_with(input) != input; });
  return result;
}

std::vector<TensorType> Op::backward_input_types(std::span<const TensorType> in,
                                                 std::span<const TensorType> out) const {
  std::vector<TensorType> result;
  const std::vector<TensorType> extra = extra_types(in);
  for (const Saved& s : saved()) {
    const auto index = static_cast<size_t>(s.index);
    result.push_back(s.kind == Saved::Kind::input    ? in[index]
                     : s.kind == Saved::Kind::output ? out[index]
                                                     : extra[index]);
  }
  const std::vector<Port> ports = outputs();
  for (size_t i = 0; i < out.size(); ++i)
    if (ports[i].role != Port::Role::index) result.push_back(out[i]);
  return result;
}

std::vector<TensorType> Op::backward_output_types(std::span<const TensorType> in) const {
  std::vector<TensorType> result;
  const std::vector<Port> ports = inputs();
  for (int index : gradient_outputs()) {
    const TensorType& type = in[static_cast<size_t>(index)];
    const bool parameter = ports[static_cast<size_t>(index)].role == Port::Role::parameter;
    result.push_back(parameter && !kernels::is_unconnected(type) ? type.with_dtype(DType::f32) : type);
    if (parameter) result.back().encoding = nullptr;
  }
  return result;
}

double traffic_bytes(std::span<const TensorType> in, std::span<const TensorType> out, const SymbolValues& symbols) {
  double total = 0;
  for (std::span<const TensorType> side : {in, out})
    for (const TensorType& type : side)
      if (!kernels::is_unconnected(type)) total += static_cast<double>(type.size_bytes(symbols));
  return total;
}

double traffic_bytes(const Op& op, Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) {
  if (pass == Pass::inference) return traffic_bytes(in, out, symbols);
  if (pass == Pass::forward) return traffic_bytes(in, out, symbols) + traffic_bytes({}, op.extra_types(in), symbols);
  double total = traffic_bytes(op.backward_input_types(in, out), {}, symbols);
  const std::vector<Port> ports = op.inputs();
  for (int index : op.gradient_outputs()) {
    const auto i = static_cast<size_t>(index);
    if (kernels::is_unconnected(in[i])) continue;
    const bool parameter = ports[i].role == Port::Role::parameter;
    total += static_cast<double>(in[i].with_dtype(parameter ? DType::f32 : in[i].dtype).size_bytes(symbols)) *
             (parameter ? 2 : 1);
  }
  return total;
}

TensorType plain_type(DType dtype, std::span<const Dim> dims) { return TensorType(dtype, dims); }

void expect_plain(std::string_view op, std::string_view port, const TensorType& type) {
  if (type.encoding != nullptr)
    throw InvalidArgument("{}: '{}' is {}; expected plain values", op, port, to_string(type));
}

void expect_cache(std::string_view op, std::string_view port, const TensorType& type) {
  if (type.encoding != nullptr && RowEncoding::of(type.encoding) == nullptr)
    throw InvalidArgument("{}: '{}' is {}; expected plain values, int8 or fp8_e4m3", op, port, to_string(type));
}

void expect_present(std::string_view op, std::string_view port, const TensorType& type) {
  if (kernels::is_unconnected(type)) throw InvalidArgument("{}: '{}' is not connected; expected a tensor", op, port);
}

void expect_replicated(std::string_view op, std::string_view port, const TensorType& type, std::string_view because) {
  if (!(type.sharding == Sharding::replicated()))
    throw InvalidArgument("{}: '{}' is {}; expected replicated ({})", op, port, to_string(type), because);
}

void expect_rank(std::string_view op, std::string_view port, const TensorType& type, int rank) {
  if (type.rank() != rank)
    throw InvalidArgument("{}: '{}' is {}; expected {} dimensions", op, port, to_string(type), rank);
}

void expect_dtype(std::string_view op, std::string_view port, const TensorType& type, std::span<const DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), type.dtype) != allowed.end()) return;
  std::string names;
  for (DType dtype : allowed) names += (names.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  throw InvalidArgument("{}: '{}' is {}; expected {}", op, port, to_string(type), names);
}

void expect_dim(std::string_view op, std::string_view port, const TensorType& type, int axis, const Dim& expected,
                std::string_view because) {
  if (!(type.dim(axis) == expected))
    throw InvalidArgument("{}: '{}' is {}; expected {} in dimension {} ({})", op, port, to_string(type),
                          to_string(expected), axis, because);
}

void expect_same_dims(std::string_view op, std::string_view port, const TensorType& type, const TensorType& other,
                      std::string_view other_port) {
  if (!type.same_dims(other))
    throw InvalidArgument("{}: '{}' is {} but '{}' is {}; expected the same shape", op, port, to_string(type),
                          other_port, to_string(other));
}

}  // namespace eadem::ops
