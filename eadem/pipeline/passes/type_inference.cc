// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/type_inference.h"

#include <algorithm>

namespace eadem::pipeline {

std::vector<TensorType> wanted_input_types(const Graph& graph, const Node& node) {
  const std::vector<TensorType> connected = graph.types_of(node.inputs);
  std::vector<TensorType> wanted = connected;
  for (size_t port = 0; port < wanted.size(); ++port)
    if (node.inputs[port] != kNoValue) wanted[port].dtype = node.op->wanted_dtype(connected, static_cast<int>(port));
  return wanted;
}

namespace {

// Sets how `outputs` are divided over one axis of the mesh.
void infer_sharding(const ops::Op& op, MeshAxis axis, std::span<const TensorType> inputs,
                    std::span<TensorType> outputs) {
  const std::optional<MeshAxis> crosses = op.crosses();
  if (crosses && *crosses != axis) {
    for (TensorType& output : outputs)
      if (!inputs.empty()) output.set_over(axis, inputs[0].over(axis));
    return;
  }
  const auto is_whole = [axis](const TensorType& type) { return type.over(axis) == Sharding::replicated(); };
  if (axis != MeshAxis::tp && !crosses && std::all_of(inputs.begin(), inputs.end(), is_whole)) return;
  std::vector<TensorType> seen;
  for (const TensorType& input : inputs) seen.push_back(input.seen_along(axis));
  const std::vector<Sharding> shardings = op.infer_sharding(seen);
  EADEM_CHECK(outputs.size() == shardings.size(), "{}: {} outputs, {} shardings", op.name(), outputs.size(),
              shardings.size());
  for (size_t i = 0; i < outputs.size(); ++i) outputs[i].set_over(axis, shardings[i]);
}

}  // namespace

void infer_node_types(Graph& graph, const Node& node) {
  try {
    const std::vector<TensorType> inputs = wanted_input_types(graph, node);
    std::vector<TensorType> outputs = node.op->infer_types(inputs);
    for (MeshAxis axis : {MeshAxis::tp, MeshAxis::dp, MeshAxis::ep}) infer_sharding(*node.op, axis, inputs, outputs);
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
