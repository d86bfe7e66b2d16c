// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/graph.h"

#include <algorithm>
#include <cstring>

namespace eadem::pipeline {

namespace {

std::string_view kind_name(Value::Kind kind) {
  switch (kind) {
    case Value::Kind::input: return "input";
    case Value::Kind::parameter: return "parameter";
    case Value::Kind::constant: return "constant";
    case Value::Kind::state: return "state";
    case Value::Kind::activation: return "activation";
  }
  return "?";
}

}  // namespace

ValueId Graph::add_named(Value::Kind kind, std::string name, const TensorType& type) {
  const auto id = static_cast<ValueId>(values_.size());
  const bool inserted = named_.emplace(name, id).second;
  EADEM_CHECK(inserted, "'{}' is added to the graph twice", name);
  values_.push_back({kind, std::move(name), type, {}});
  return id;
}

std::optional<ValueId> Graph::find_same(Value::Kind kind, const std::string& name, const TensorType& type) const {
  const auto found = named_.find(name);
  if (found == named_.end()) return std::nullopt;
  const Value& existing = value(found->second);
  EADEM_CHECK(existing.kind == kind && existing.type == type, "'{}' is a {} {} and a {} {}", name,
              kind_name(existing.kind), to_string(existing.type), kind_name(kind), to_string(type));
  return found->second;
}

ValueId Graph::add_input(std::string name, const TensorType& type) {
  return add_named(Value::Kind::input, std::move(name), type);
}

ValueId Graph::add_parameter(std::string name, const TensorType& type, int shard_axis, bool has_experts) {
  if (const auto found = find_same(Value::Kind::parameter, name, type)) return *found;
  const ValueId id = add_named(Value::Kind::parameter, std::move(name), type);
  shard_axes_[id] = shard_axis;
  have_experts_[id] = has_experts;
  return id;
}

ValueId Graph::add_parameter_columns(std::string name, const ParameterColumns& columns, const TensorType& type,
                                     bool has_experts) {
  const ValueId id = add_parameter(std::move(name), type, -1, has_experts);
  value(id).columns = columns;
  return id;
}

ValueId Graph::add_constant(std::string name, Tensor host) {
  const std::vector<Dim> dims(host.shape().dims().begin(), host.shape().dims().end());
  const TensorType type(host.dtype(), dims);
  if (const auto found = find_same(Value::Kind::constant, name, type)) {
    EADEM_CHECK(
        std::memcmp(value(*found).constant.view.data, host.view.data, static_cast<size_t>(host.view.size_bytes())) == 0,
        "constant '{}' is added to the graph twice, with other bytes", name);
    return *found;
  }
  const ValueId id = add_named(Value::Kind::constant, std::move(name), type);
  value(id).constant = std::move(host);
  return id;
}

ValueId Graph::add_state(std::string name, const TensorType& type) {
  if (const auto found = find_same(Value::Kind::state, name, type)) return *found;
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
  std::string name = scoped_name(op->name());
  if (const int uses = ++ops_named_[name]; uses > 1) name += fmt::format("_{}", uses);
  std::vector<ValueId> outputs;
  for (const ops::Port& port : out_ports) outputs.push_back(new_activation(fmt::format("{}.{}", name, port.name)));
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

void Graph::forget(ValueId id) {
  if (value(id).kind != Value::Kind::activation) named_.erase(value(id).name);
  value(id) = Value{
      .kind = Value::Kind::activation, .name = value(id).name, .type = value(id).type, .constant = {}, .columns = {}};
}

int Graph::shard_axis(ValueId parameter, MeshAxis over) const {
  if (over == MeshAxis::ep) {
    const auto experts = have_experts_.find(parameter);
    return experts != have_experts_.end() && experts->second ? 0 : -1;
  }
  if (over != MeshAxis::tp) return -1;
  const auto found = shard_axes_.find(parameter);
  return found == shard_axes_.end() ? -1 : found->second;
}

std::vector<Symbol> Graph::symbols() const {
  std::vector<Symbol> result;
  for (const Value& value : values_)
    for (const Dim& dim : value.type.dims())
      if (!dim.is_fixed() && std::find(result.begin(), result.end(), dim.symbol) == result.end())
        result.push_back(dim.symbol);
  return result;
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
  for (ValueId id : ids) types.push_back(id == kNoValue ? kernels::unconnected_port() : value(id).type);
  return types;
}

std::string describe(const Node& node) {
  return node.scope.empty() ? std::string(node.op->name()) : fmt::format("{}: {}", node.scope, node.op->name());
}

}  // namespace eadem::pipeline
