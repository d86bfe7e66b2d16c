// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/pass_calls.h"

#include <algorithm>
#include <cstring>

#include "tests/workloads/inputs.h"

namespace eadem::test {

using kernels::Pass;
using ops::Port;
using ops::Saved;

namespace {

Tensor copy_of(const Tensor& host) {
  if (host.view.encoding != nullptr) {
    Tensor result = Tensor::on_host(host.dtype(), host.shape(), *host.view.encoding);
    const std::vector<PlaneSpec> planes = host.view.encoding->planes(host.shape());
    for (size_t i = 0; i < planes.size(); ++i)
      std::memcpy(result.view.plane(static_cast<int>(i)), host.view.plane(static_cast<int>(i)),
                  static_cast<size_t>(planes[i].size_bytes()));
    return result;
  }
  Tensor result = Tensor::on_host(host.dtype(), host.shape());
  if (host.view.num_elements() > 0)
    std::memcpy(result.view.data, host.view.data, static_cast<size_t>(host.view.size_bytes()));
  return result;
}

// NaN: what an output that is written, not accumulated, must not let through.
Tensor unwritten(const TensorType& type, const SymbolValues& symbols) {
  if (type.encoding != nullptr) {
    Tensor encoded = Tensor::on_host(type.dtype, type.bind(symbols), *type.encoding);
    const std::vector<PlaneSpec> planes = type.encoding->planes(encoded.shape());
    for (size_t i = 0; i < planes.size(); ++i)
      std::memset(encoded.view.plane(static_cast<int>(i)), 0xff, static_cast<size_t>(planes[i].size_bytes()));
    return encoded;
  }
  Tensor result = Tensor::on_host(type.dtype, type.bind(symbols));
  if (result.view.num_elements() > 0)
    std::memset(result.view.data, 0xff, static_cast<size_t>(result.view.size_bytes()));
  return result;
}

ExpectedCall straight_expected(const ops::Workload& row, Pass pass, std::vector<Tensor> inputs) {
  ExpectedCall result;
  result.call = straight_call(row, pass, std::move(inputs));
  result.inputs = widen(result.call.inputs);
  result.initial = widen(result.call.outputs);
  result.expected = result.initial;
  row.op->reference(pass, result.inputs, result.expected);
  return result;
}

}  // namespace

PassCall straight_call(const ops::Workload& row, Pass pass, std::vector<Tensor> inputs) {
  PassCall call;
  call.op = row.op;
  call.pass = pass;
  call.symbols = row.symbols;
  call.input_types = row.inputs;
  call.output_types = row.op->infer_types(row.inputs);
  const std::vector<Port> ports = row.op->outputs();
  const size_t num_outputs = call.output_types.size();
  if (pass == Pass::forward)
    for (const TensorType& extra : row.op->extra_types(row.inputs)) call.output_types.push_back(extra);
  call.inputs = std::move(inputs);
  for (size_t i = 0; i < call.output_types.size(); ++i) {
    const bool state = i < num_outputs && ports[i].role == Port::Role::state;
    call.output_alias.push_back(state ? row.op->inference_alias(static_cast<int>(i)) : -1);
    if (kernels::is_unconnected(call.output_types[i]))
      call.outputs.emplace_back();
    else if (state)
      call.outputs.push_back(copy_of(call.inputs[static_cast<size_t>(call.output_alias[i])]));
    else
      call.outputs.push_back(unwritten(call.output_types[i], row.symbols));
  }
  return call;
}

PassCall straight_call(const ops::Workload& row, Pass pass, uint64_t seed) {
  return straight_call(row, pass, workloads::make_inputs(*row.op, row.inputs, row.symbols, seed));
}

std::optional<ExpectedCall> expected_call(const ops::Workload& row, Pass pass, std::vector<Tensor> op_inputs,
                                          uint64_t seed) {
  const ops::Op& op = *row.op;
  if (pass != Pass::backward) return straight_expected(row, pass, std::move(op_inputs));
  if (!op.has_backward() || op.passes_gradient_through()) return std::nullopt;

  const ExpectedCall forward = straight_expected(row, Pass::forward, std::move(op_inputs));
  const std::vector<TensorType> outputs = op.infer_types(row.inputs);
  ExpectedCall result;
  PassCall& call = result.call;
  call.op = row.op;
  call.pass = pass;
  call.symbols = row.symbols;
  call.input_types = op.backward_input_types(row.inputs, outputs);
  call.output_types = op.backward_output_types(row.inputs);
  // Saved tensors as a forward pass would have left them: rounded to their dtypes.
  for (const Saved& saved : op.saved()) {
    const auto index = static_cast<size_t>(saved.index);
    if (saved.kind == Saved::Kind::input)
      call.inputs.push_back(forward.call.inputs[index]);
    else {
      const size_t slot = saved.kind == Saved::Kind::output ? index : outputs.size() + index;
      call.inputs.push_back(narrow(forward.expected[slot], forward.call.output_types[slot].dtype));
    }
  }
  const std::vector<Port> output_ports = op.outputs();
  for (size_t i = 0; i < outputs.size(); ++i)
    if (output_ports[i].role != Port::Role::index)
      call.inputs.push_back(workloads::random_tensor(outputs[i].dtype, outputs[i].bind(row.symbols), seed + 100 + i));
  const std::vector<Port> ports = op.inputs();
  const std::vector<int> differentiable = op.gradient_outputs();
  for (size_t i = 0; i < differentiable.size(); ++i) {
    const TensorType& type = call.output_types[i];
    if (kernels::is_unconnected(type))
      call.outputs.emplace_back();
    else if (ports[static_cast<size_t>(differentiable[i])].role == Port::Role::parameter)
      call.outputs.push_back(workloads::random_tensor(type.dtype, type.bind(row.symbols), seed + 200 + i));
    else
      call.outputs.push_back(unwritten(type, row.symbols));
  }
  result.inputs = widen(call.inputs);
  result.initial = widen(call.outputs);
  result.expected = result.initial;
  op.reference(pass, result.inputs, result.expected);
  return result;
}

std::optional<ExpectedCall> expected_call(const ops::Workload& row, Pass pass, uint64_t seed) {
  return expected_call(row, pass, workloads::make_inputs(*row.op, row.inputs, row.symbols, seed), seed);
}

std::vector<ExpectedCall> divided(const ExpectedCall& whole, const ops::Workload& row) {
  const std::vector<int> nodes =
      whole.call.pass == Pass::backward ? row.op->gradient_nodes(row.inputs) : std::vector<int>{};
  if (nodes.empty()) return {whole};
  std::vector<ExpectedCall> parts;
  for (int n = 0; n <= *std::max_element(nodes.begin(), nodes.end()); ++n) {
    ExpectedCall& part = parts.emplace_back(whole);
    for (size_t i = 0; i < nodes.size(); ++i)
      if (nodes[i] != n) {
        part.call.outputs[i] = {};
        part.call.output_types[i] = kernels::unconnected_port();
        part.initial[i] = part.expected[i] = {};
      }
  }
  return parts;
}

}  // namespace eadem::test
