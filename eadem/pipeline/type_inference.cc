// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/type_inference.h"

namespace eadem::pipeline {

std::vector<TensorType> wanted_input_types(const Graph& graph, const Node& node) {
  const std::vector<TensorType> connected = graph.types_of(node.inputs);
  std::vector<TensorType> wanted = connected;
  for (size_t port = 0; port < wanted.size(); ++port)
    if (node.inputs[port] != kNoValue) wanted[port].dtype = node.op->wanted_dtype(connected, static_cast<int>(port));
  return wanted;
}

void infer_node_types(Graph& graph, const Node& node) {
  try {
    const std::vector<TensorType> inputs = wanted_input_types(graph, node);
    std::vector<TensorType> outputs = node.op->infer_types(inputs);
    const std::vector<Sharding> shardings = node.op->infer_sharding(inputs);
    EADEM_CHECK(outputs.size() == shardings.size(), "{}: {} outputs, {} shardings", node.op->name(), outputs.size(),
                shardings.size());
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].sharding = shardings[i];
    for (const TensorType& extra : node.op->extra_types(inputs)) outputs.push_back(extra);
    for (size_t i = 0; i < node.outputs.size(); ++i)
      if (node.outputs[i] != kNoValue) graph.value(node.outputs[i]).type = outputs[i];
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}{}{}", node.scope, node.scope.empty() ? "" : ": ", error.what());
  }
}

void infer_types(Graph& graph) {
  for (const Node& node : graph.nodes()) infer_node_types(graph, node);
}

}  // namespace eadem::pipeline
