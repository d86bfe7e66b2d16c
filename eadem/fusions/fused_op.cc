// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/fused_op.h"

#include <algorithm>

namespace eadem::fusions {

FusedOp::FusedOp(const Fusion& fusion, std::vector<ops::OpPtr> parts) : fusion_(fusion), parts_(std::move(parts)) {
  EADEM_CHECK(parts_.size() == fusion.nodes.size(), "{}: {} parts for {} nodes", fusion.name, parts_.size(),
              fusion.nodes.size());
  for (const PatternNode& node : fusion.nodes)
    for (const std::vector<int>& ids : {node.inputs, node.outputs})
      for (int id : ids) num_values_ = std::max(num_values_, static_cast<size_t>(id + 1));
}

FusedOp::Types FusedOp::types_of(const Types& values, const std::vector<int>& ids) {
  Types types;
  for (int id : ids) types.push_back(id < 0 ? kernels::unconnected_port() : values[static_cast<size_t>(id)]);
  return types;
}

FusedOp::Types FusedOp::walk(std::span<const TensorType> in, const Rule& rule) const {
  Types values(num_values_, kernels::unconnected_port());
  for (size_t port = 0; port < fusion_.inputs.size(); ++port)
    values[static_cast<size_t>(fusion_.inputs[port])] = in[port];
  for (size_t n = 0; n < parts_.size(); ++n) {
    const PatternNode& node = fusion_.nodes[n];
    const Types outputs = rule(n, types_of(values, node.inputs));
    for (size_t i = 0; i < node.outputs.size(); ++i) values[static_cast<size_t>(node.outputs[i])] = outputs[i];
  }
  return values;
}

std::vector<TensorType> FusedOp::infer_types(std::span<const TensorType> in) const {
  const Types values = walk(in, [&](size_t n, const Types& types) { return part(n).infer_types(types); });
  return types_of(values, fusion_.outputs);
}

DType FusedOp::wanted_dtype(std::span<const TensorType> in, int port) const {
  const int value = fusion_.inputs[static_cast<size_t>(port)];
  std::optional<DType> wanted;  // what the first part that reads the value wants
  walk(in, [&](size_t n, const Types& connected) {
    Types types = connected;
    for (size_t i = 0; i < types.size(); ++i) {
      if (kernels::is_unconnected(types[i])) continue;
      types[i].dtype = part(n).wanted_dtype(connected, static_cast<int>(i));
      if (fusion_.nodes[n].inputs[i] == value && !wanted) wanted = types[i].dtype;
    }
    return part(n).infer_types(types);
  });
  return wanted.value_or(in[static_cast<size_t>(port)].dtype);
}

std::vector<Sharding> FusedOp::infer_sharding(std::span<const TensorType> in) const {
  const Types values = walk(in, [&](size_t n, const Types& types) {
    Types outputs = part(n).infer_types(types);
    const std::vector<Sharding> shardings = part(n).infer_sharding(types);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].sharding = shardings[i];
    return outputs;
  });
  std::vector<Sharding> result;
  for (const TensorType& type : types_of(values, fusion_.outputs)) result.push_back(type.sharding);
  return result;
}

ops::Cost FusedOp::parts_cost(std::span<const TensorType> in, const SymbolValues& symbols) const {
  ops::Cost total;
  walk(in, [&](size_t n, const Types& types) {
    Types outputs = part(n).infer_types(types);
    total += part(n).cost(ops::Pass::inference, types, outputs, symbols);
    return outputs;
  });
  return total;
}

double FusedOp::saved_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  std::vector<int> times_moved(num_values_, 0);
  std::vector<bool> is_state(num_values_, false);
  const Types values = walk(in, [&](size_t n, const Types& types) {
    const PatternNode& node = fusion_.nodes[n];
    const std::vector<ops::Port> ports = part(n).inputs();
    for (size_t i = 0; i < node.inputs.size(); ++i)
      if (node.inputs[i] >= 0 && ports[i].role == ops::Port::Role::state)
        is_state[static_cast<size_t>(node.inputs[i])] = true;
    if (!part(n).is_view())
      for (const std::vector<int>& ids : {node.inputs, node.outputs})
        for (int id : ids)
          if (id >= 0) ++times_moved[static_cast<size_t>(id)];
    return part(n).infer_types(types);
  });
  for (const std::vector<int>& ids : {fusion_.inputs, fusion_.outputs})
    for (int id : ids) --times_moved[static_cast<size_t>(id)];
  double bytes = 0;
  for (size_t v = 0; v < num_values_; ++v)
    if (!is_state[v] && times_moved[v] > 0)
      bytes += times_moved[v] * static_cast<double>(values[v].size_bytes(symbols));
  return bytes;
}

ops::Cost FusedOp::cost(ops::Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                        const SymbolValues& symbols) const {
  return {parts_cost(in, symbols).flops, ops::traffic_bytes(*this, pass, in, out, symbols)};
}

ops::RefTensor ref_zeros(const Shape& shape) {
  return {shape, std::vector<double>(static_cast<size_t>(shape.num_elements()), 0.0)};
}

}  // namespace eadem::fusions
