// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/sharding.h"

#include <map>

#include "eadem/ops/all_reduce.h"
#include "eadem/pipeline/type_inference.h"

namespace eadem::pipeline {

namespace {

void divide_parameters(Graph& graph, int num_ranks) {
  for (size_t i = 0; i < graph.values().size(); ++i) {
    Value& value = graph.values()[i];
    const int axis = value.kind == Value::Kind::parameter ? graph.shard_axis(static_cast<ValueId>(i)) : -1;
    if (axis < 0) continue;
    const int64_t whole = value.type.fixed(axis);
    if (whole % num_ranks != 0)
      throw InvalidArgument("'{}' is {}; dimension {} does not divide into {} tensor-parallel ranks", value.name,
                            to_string(value.type), axis, num_ranks);
    value.type.dim(axis) = whole / num_ranks;
    value.type.sharding = Sharding::along(axis);
  }
}

}  // namespace

void shard(Graph& graph, int num_ranks) {
  EADEM_CHECK(num_ranks >= 1, "{} ranks", num_ranks);
  if (num_ranks == 1) return infer_types(graph);
  divide_parameters(graph, num_ranks);
  std::vector<Node> old_nodes = std::move(graph.nodes());
  graph.nodes().clear();
  std::map<ValueId, ValueId> reduced;
  const auto whole = [&](ValueId id, const std::string& scope, int layer) {
    auto [found, inserted] = reduced.try_emplace(id, kNoValue);
    if (inserted) {
      found->second = graph.new_activation(graph.value(id).name + ".all_reduce");
      graph.nodes().push_back({.op = std::make_shared<ops::AllReduce>(),
                               .inputs = {id},
                               .outputs = {found->second},
                               .scope = scope,
                               .layer = layer});
      infer_node_types(graph, graph.nodes().back());
    }
    return found->second;
  };
  for (Node& node : old_nodes) {
    for (ValueId& id : node.inputs)
      if (id != kNoValue && graph.value(id).type.sharding.kind == Sharding::Kind::partial &&
          node.op->name() != "all_reduce")
        id = whole(id, node.scope, node.layer);
    infer_node_types(graph, node);
    graph.nodes().push_back(std::move(node));
  }
  for (GraphOutput& output : graph.outputs())
    if (graph.value(output.value).type.sharding.kind == Sharding::Kind::partial)
      output.value = whole(output.value, "", -1);
}

}  // namespace eadem::pipeline
