// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/precision.h"

#include <map>

#include "eadem/ops/elementwise.h"
#include "eadem/pipeline/passes/type_inference.h"

namespace eadem::pipeline {

void insert_casts(Graph& graph) {
  std::vector<Node> old_nodes = std::move(graph.nodes());
  graph.nodes().clear();
  std::map<std::pair<ValueId, DType>, ValueId> casts;
  for (Node& node : old_nodes) {
    const std::vector<TensorType> wanted = wanted_input_types(graph, node);
    for (size_t port = 0; port < node.inputs.size(); ++port) {
      const ValueId id = node.inputs[port];
      if (id == kNoValue || graph.value(id).type.dtype == wanted[port].dtype) continue;
      const Value::Kind kind = graph.value(id).kind;
      if (kind != Value::Kind::activation && kind != Value::Kind::input) continue;
      auto [found, inserted] = casts.try_emplace({id, wanted[port].dtype}, kNoValue);
      if (inserted) {
        found->second = graph.new_activation(graph.value(id).name + "." + std::string(dtype_name(wanted[port].dtype)));
        graph.nodes().push_back({.op = std::make_shared<ops::Cast>(kernels::CastAttrs{wanted[port].dtype}),
                                 .inputs = {id},
                                 .outputs = {found->second},
                                 .scope = node.scope,
                                 .layer = node.layer});
        infer_node_types(graph, graph.nodes().back());
      }
      node.inputs[port] = found->second;
    }
    infer_node_types(graph, node);
    graph.nodes().push_back(std::move(node));
  }
}

}  // namespace eadem::pipeline
