// SPDX-License-Identifier: Apache-2.0
//
// Graph: ops and the values that flow between them. A DAG in program order: a node's inputs are made by earlier nodes,
// by the step's inputs, or are parameters, constants and states. Residual branches are edges like any other.
//
// Modules fill a graph; the steps of a ComputePipeline (type_inference, precision, sharding, fusion, autograd) rewrite
// it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eadem/core/tensor_type.h"
#include "eadem/ops/op.h"

namespace eadem::pipeline {

using ops::OpPtr;
using ops::Pass;

using ValueId = int32_t;
inline constexpr ValueId kNoValue = -1;  // an optional port that is not connected

// Columns of a parameter, elements of the last axis, that a graph reads as a parameter of their own.
struct ParameterColumns {
  std::string parameter;
  int64_t begin = 0;  // within this rank's part
  int64_t of = 0;     // columns of this rank's part
};

struct Value {
  enum class Kind : uint8_t {
    input,       // set by the caller before each step
    parameter,   // weights, owned by the ParameterStore
    constant,    // host data fixed when the graph is built
    state,       // lives between steps: caches, gradients of parameters, optimizer moments; owned by the caller
    activation,  // made by a node, lives within a step
  };
  Kind kind;
  std::string name;
  TensorType type;                               // for activations, known after type inference
  Tensor constant;                               // kind == constant: a host tensor
  std::optional<ParameterColumns> columns = {};  // kind == parameter: of another one
};

struct Node {
  OpPtr op;
  Pass pass = Pass::inference;
  std::vector<ValueId> inputs;   // port order of the pass; kNoValue where nothing is connected
  std::vector<ValueId> outputs;  // likewise; kNoValue where nobody wants the output
  // Backward nodes: the ports of the forward node that they belong to, without its extra tensors.
  std::vector<ValueId> forward_inputs, forward_outputs;
  std::string scope;     // "layers.0.self_attn": who added it
  int layer = -1;        // transformer layer, or -1; of several layers in one node the last
  int first_layer = -1;  // of several layers in one node the first; else -1
};

// A named value that the caller can read after a step.
struct GraphOutput {
  std::string name;
  ValueId value;
};

class Graph {
 public:
  ValueId add_input(std::string name, const TensorType& type);
  // `shard_axis`: the axis along which tensor-parallel ranks divide it, or -1 to replicate. `has_experts`: the first
  // axis is that of experts, which expert-parallel ranks divide. Adding a name again returns the same value (tied
  // weights); the types must agree.
  ValueId add_parameter(std::string name, const TensorType& type, int shard_axis = -1, bool has_experts = false);
  // Columns of a parameter, by a name of their own. `type` is that of these columns on this rank, and divided as the
  // parameter is; expert-parallel ranks divide it as they do others.
  ValueId add_parameter_columns(std::string name, const ParameterColumns& columns, const TensorType& type,
                                bool has_experts = false);
  // Adding a name again returns the same value; type and bytes must agree.
  ValueId add_constant(std::string name, Tensor host);
  // Adding a name again returns the same value; the types must agree.
  ValueId add_state(std::string name, const TensorType& type);

  // Appends `op` and returns its outputs, one per output port. Optional inputs may be kNoValue or left off at the end.
  // An output is named after scope, op and port ("layers.0.add.y"); the second op of one name in a scope is "add_2".
  std::vector<ValueId> add(OpPtr op, std::vector<ValueId> inputs);
  // Appends an op with one output and returns that.
  ValueId add1(OpPtr op, std::vector<ValueId> inputs) { return add(std::move(op), std::move(inputs)).at(0); }

  void mark_output(std::string name, ValueId value);

  // Nodes added while a Scope lives carry its path. Scopes nest: "layers.0" inside "model" gives "model.layers.0".
  class Scope {
   public:
    Scope(Graph& graph, std::string_view name, int layer = -1);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Graph& graph_;
    size_t old_size_;
    int old_layer_;
  };
  const std::string& scope() const { return scope_; }
  // The current scope's path followed by `name`: how modules name parameters.
  std::string scoped_name(std::string_view name) const;

  const std::vector<Value>& values() const { return values_; }
  std::vector<Value>& values() { return values_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  std::vector<Node>& nodes() { return nodes_; }
  const std::vector<GraphOutput>& outputs() const { return outputs_; }
  std::vector<GraphOutput>& outputs() { return outputs_; }
  const Value& value(ValueId id) const { return values_[static_cast<size_t>(id)]; }
  Value& value(ValueId id) { return values_[static_cast<size_t>(id)]; }
  // The axis along which the ranks of `over` divide a parameter, or -1.
  int shard_axis(ValueId parameter, MeshAxis over = MeshAxis::tp) const;
  // The symbols in the types of all values, each once.
  std::vector<Symbol> symbols() const;

  // Makes a value that no node reads or makes any more an activation without a name: its parameter or state is not the
  // graph's any more.
  void forget(ValueId id);

  // Adds a value that a pipeline step needs.
  ValueId new_activation(std::string name);
  std::optional<ValueId> find(std::string_view name) const;  // inputs, parameters, constants and states
  // The types of a node's inputs or outputs as connected; unconnected_port() where nothing is.
  std::vector<TensorType> types_of(std::span<const ValueId> ids) const;

 private:
  ValueId add_named(Value::Kind kind, std::string name, const TensorType& type);
  // The value of that name, if there is one; it must have this kind and type.
  std::optional<ValueId> find_same(Value::Kind kind, const std::string& name, const TensorType& type) const;

  std::vector<Value> values_;
  std::vector<Node> nodes_;
  std::vector<GraphOutput> outputs_;
  std::unordered_map<std::string, ValueId> named_;
  std::unordered_map<ValueId, int> shard_axes_;     // over tp
  std::unordered_map<ValueId, bool> have_experts_;  // parameters
  std::unordered_map<std::string, int> ops_named_;  // by scope and op
  std::string scope_;
  int layer_ = -1;
};

// "layers.0.self_attn: linear (q_proj)": for messages about a node.
std::string describe(const Node& node);

}  // namespace eadem::pipeline
