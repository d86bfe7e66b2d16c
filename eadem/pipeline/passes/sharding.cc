// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/sharding.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "eadem/ops/parallel/collectives.h"
#include "eadem/pipeline/passes/type_inference.h"

namespace eadem::pipeline {

namespace {

using Kind = Sharding::Kind;

void divide_parameters(Graph& graph, const Mesh& mesh, MeshAxis over) {
  const int ranks = mesh.size(over);
  if (ranks == 1) return;
  for (size_t i = 0; i < graph.values().size(); ++i) {
    Value& value = graph.values()[i];
    const int axis = value.kind == Value::Kind::parameter ? graph.shard_axis(static_cast<ValueId>(i), over) : -1;
    if (axis < 0) continue;
    const int64_t whole = value.type.fixed(axis);
    if (whole < ranks)
      throw InvalidArgument("'{}' is {}; dimension {} does not divide into {} {} ranks", value.name,
                            to_string(value.type), axis, ranks,
                            over == MeshAxis::tp ? "tensor-parallel" : "expert-parallel");
    value.type.dim(axis) = part_of(whole, ranks, mesh.rank(over)).size;
    value.type.set_over(over, Sharding::along(axis, whole % ranks == 0 ? 0 : whole));
  }
}

class Resharder {
 public:
  Resharder(Graph& graph, const Mesh& mesh) : graph_(graph), mesh_(mesh) {}

  void run(std::span<const std::string> whole_outputs) {
    std::vector<Node> nodes = std::move(graph_.nodes());
    graph_.nodes().clear();
    for (Node& node : nodes) {
      for (MeshAxis axis : {MeshAxis::tp, MeshAxis::ep, MeshAxis::dp}) convert_inputs(node, axis);
      append(std::move(node));
    }
    for (GraphOutput& output : graph_.outputs()) {
      const bool whole = std::find(whole_outputs.begin(), whole_outputs.end(), output.name) != whole_outputs.end();
      for (MeshAxis axis : {MeshAxis::tp, MeshAxis::ep, MeshAxis::dp})
        if (whole || graph_.value(output.value).type.over(axis).kind == Kind::partial)
          output.value = converted(output.value, axis, Sharding::replicated());
    }
  }

 private:
  void append(Node node) {
    infer_node_types(graph_, node);
    for (ValueId id : node.outputs)
      if (id != kNoValue) maker_[id] = {node.scope, node.layer};
    graph_.nodes().push_back(std::move(node));
  }

  void convert_inputs(Node& node, MeshAxis axis) {
    if (mesh_.size(axis) == 1 || node.op->crosses()) return;
    std::vector<TensorType> seen;
    for (const TensorType& type : graph_.types_of(node.inputs)) seen.push_back(type.seen_along(axis));
    for (size_t port = 0; port < node.inputs.size(); ++port)
      if (node.inputs[port] != kNoValue)
        node.inputs[port] = converted(node.inputs[port], axis, node.op->wanted_sharding(seen, static_cast<int>(port)));
  }

  // `value` as `wanted` over `axis`: itself, or the result of a collective, which all readers share.
  ValueId converted(ValueId id, MeshAxis axis, Sharding wanted) {
    const TensorType type = graph_.value(id).type;
    const Sharding has = type.over(axis);
    if (has == wanted || wanted.kind == Kind::partial) return id;
    auto [found, inserted] = converted_.try_emplace(std::tuple(id, axis, wanted.kind, wanted.axis), kNoValue);
    if (!inserted) return found->second;
    const std::shared_ptr<const ops::Op> op = collective(id, axis, has, wanted);
    const ValueId result = graph_.new_activation(fmt::format("{}.{}", graph_.value(id).name, op->name()));
    found->second = result;
    if (is_state(id)) state_versions_.insert(result);
    const auto [scope, layer] = maker_[id];
    append({.op = op, .inputs = {id}, .outputs = {result}, .scope = scope, .layer = layer});
    return result;
  }

  bool is_state(ValueId id) const {
    return graph_.value(id).kind == Value::Kind::state || state_versions_.contains(id);
  }

  std::shared_ptr<const ops::Op> collective(ValueId id, MeshAxis axis, Sharding has, Sharding wanted) const {
    const Value& value = graph_.value(id);
    const int ranks = mesh_.size(axis);
    kernels::CollectiveAttrs attrs{.over = axis, .ranks = ranks, .rank = mesh_.rank(axis), .dim = has.axis};
    if (has.kind == Kind::partial && wanted.kind == Kind::replicated)
      return std::make_shared<ops::AllReduce>(axis, ranks, is_state(id));
    if (has.kind == Kind::partial) {
      attrs.dim = wanted.axis;
      attrs.whole = value.type.fixed(wanted.axis);
      return std::make_shared<ops::ReduceScatter>(attrs);
    }
    if (has.kind == Kind::sharded) {
      attrs.whole = has.whole > 0 ? has.whole : value.type.fixed(has.axis) * ranks;
      if (wanted.kind == Kind::replicated) return std::make_shared<ops::AllGather>(attrs);
      attrs.other_dim = wanted.axis;
      return std::make_shared<ops::AllToAll>(attrs);
    }
    throw InvalidArgument("'{}' is {}; nothing makes it {} over {}", value.name, to_string(value.type),
                          to_string(wanted), mesh_axis_name(axis));
  }

  Graph& graph_;
  const Mesh& mesh_;
  std::map<std::tuple<ValueId, MeshAxis, Kind, int8_t>, ValueId> converted_;
  std::map<ValueId, std::pair<std::string, int>> maker_;  // scope and layer of the node that makes a value
  std::set<ValueId> state_versions_;                      // results of collectives that change a state in place
};

}  // namespace

void shard(Graph& graph, const Mesh& mesh, std::span<const std::string> whole_outputs) {
  if (mesh.num_ranks() == 1) return infer_types(graph);
  for (MeshAxis axis : {MeshAxis::tp, MeshAxis::ep}) divide_parameters(graph, mesh, axis);
  Resharder(graph, mesh).run(whole_outputs);
}

}  // namespace eadem::pipeline
