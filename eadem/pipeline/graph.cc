// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

ValueId Graph::add_named(Value::Kind kind, std::string name, const TensorType& type) {
  const auto id = static_cast<ValueId>(values_.size());
  const bool inserted = named_.emplace(name, id).second;
  EADEM_CHECK(inserted, "'{}' is added to the graph twice", name);
  values_.push_back({kind, std::move(name), type, {}});
  return id;
}

ValueId Graph::add_input(std::string name, const TensorType& type) {
  return add_named(Value::Kind::input, std::move(name), type);
}

ValueId Graph::add_parameter(std::string name, const TensorType& type, int shard_axis) {
  if (const auto found = named_.find(name); found != named_.end()) {
    const Value& existing = value(found->second);
    EADEM_CHECK(existing.kind == Value::Kind::parameter && existing.type == type, "'{}' is {} and {}", name,
                to_string(existing.type), to_string(type));
    return found->second;
  }
  const ValueId id = add_named(Value::Kind::parameter, std::move(name), type);
  shard_axes_[id] = shard_axis;
  return id;
}

ValueId Graph::add_constant(std::string name, Tensor host) {
  if (const auto found = named_.find(name); found != named_.end()) return found->second;
  std::vector<Dim> dims(host.shape().dims().begin(), host.shape().dims().end());
  const ValueId id = add_named(Value::Kind::constant, std::move(name), TensorType(host.dtype(), dims));
  value(id).constant = std::move(host);
  return id;
}

ValueId Graph::add_state(std::string name, const TensorType& type) {
  if (const auto found = named_.find(name); found != named_.end()) return found->second;
  return add_named(Value::Kind::state, std::move(name), type);
}

std::vector<ValueId> Graph::add(OpPtr op, std::vector<ValueId> inputs) {
  const std::vector<ops::Port> ports = op->inputs();
  EADEM_CHECK(inputs.size() <= ports.size(), "{}: {} inputs for {} ports", op->name(), inputs.size(), ports.size());
  inputs.resize(ports.size(), kNoValue);
  for (size_t i = 0; i < ports.size(); ++i)
    EADEM_CHECK(ports[i].optional || inputs[i] != kNoValue, "{}: input '{}' is not connected", op->name(),
                ports[i].name);
  const std::vector<ops::Port> out_ports = op->outputs();
  std::vector<ValueId> outputs;
  for (const ops::Port& port : out_ports)
    outputs.push_back(new_activation(scoped_name(std::string(op->name()) + "." + std::string(port.name))));
  nodes_.push_back({.op = std::move(op),
                    .pass = Pass::inference,
                    .inputs = std::move(inputs),
                    .outputs = outputs,
                    .scope = scope_,
                    .layer = layer_});
  return outputs;
}

void Graph::mark_output(std::string name, ValueId id) { outputs_.push_back({std::move(name), id}); }

Graph::Scope::Scope(Graph& graph, std::string_view name, int layer)
    : graph_(graph), old_size_(graph.scope_.size()), old_layer_(graph.layer_) {
  if (!graph_.scope_.empty() && !name.empty()) graph_.scope_ += '.';
  graph_.scope_ += name;
  if (layer >= 0) graph_.layer_ = layer;
}

Graph::Scope::~Scope() {
  graph_.scope_.resize(old_size_);
  graph_.layer_ = old_layer_;
}

std::string Graph::scoped_name(std::string_view name) const {
  return scope_.empty() ? std::string(name) : scope_ + "." + std::string(name);
}

int Graph::shard_axis(ValueId parameter) const {
  const auto found = shard_axes_.find(parameter);
  return found == shard_axes_.end() ? -1 : found->second;
}

ValueId Graph::new_activation(std::string name) {
  values_.push_back({Value::Kind::activation, std::move(name), {}, {}});
  return static_cast<ValueId>(values_.size()) - 1;
}

std::optional<ValueId> Graph::find(std::string_view name) const {
  const auto found = named_.find(std::string(name));
  if (found == named_.end()) return std::nullopt;
  return found->second;
}

std::vector<TensorType> Graph::types_of(std::span<const ValueId> ids) const {
  std::vector<TensorType> types;
  types.reserve(ids.size());
  for (ValueId id : ids) types.push_back(id == kNoValue ? kernels::absent_port() : value(id).type);
  return types;
}

std::string describe(const Node& node) {
  return node.scope.empty() ? std::string(node.op->name()) : fmt::format("{}: {}", node.scope, node.op->name());
}

}  // namespace eadem::pipeline
