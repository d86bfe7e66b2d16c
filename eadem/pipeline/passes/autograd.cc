// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/autograd.h"

#include <algorithm>
#include <map>
#include <set>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/parallel/collectives.h"
#include "eadem/ops/quantize.h"

namespace eadem::pipeline {

namespace {

class Differentiator {
 public:
  Differentiator(Graph& graph, const Mesh& mesh, std::span<const std::string> frozen)
      : graph_(graph), mesh_(mesh), frozen_(frozen) {}

  Differentiated run(std::span<const std::string> input_gradients, std::span<const std::string> deferred) {
    const size_t num_forward = graph_.nodes().size();
    mark_needed(input_gradients);
    for (size_t n = 0; n < num_forward; ++n) make_forward(graph_.nodes()[n]);
    const std::vector<GraphOutput> seeds = graph_.outputs();
    for (const GraphOutput& output : seeds)
      if (needed_.at(static_cast<size_t>(output.value)))
        accumulate(output.value, graph_.add_input("d." + output.name, graph_.value(output.value).type), "");
    for (size_t n = num_forward; n-- > 0;) add_backward(n);
    for (const std::string& name : input_gradients) {
      const ValueId input = *graph_.find(name);
      if (gradient(input) == kNoValue) throw InvalidArgument("input '{}' does not influence any output", name);
      graph_.mark_output("d." + name, whole(gradient(input), "", -1));
    }
    result_.forward_end = num_forward;
    defer(deferred);
    std::sort(result_.parameters.begin(), result_.parameters.end());
    result_.parameters.erase(std::unique(result_.parameters.begin(), result_.parameters.end()),
                             result_.parameters.end());
    return result_;
  }

 private:
  // needed_[v]: some parameter that is not frozen or wanted input influences v through differentiable ports.
  void mark_needed(std::span<const std::string> input_gradients) {
    needed_.assign(graph_.values().size(), false);
    for (size_t v = 0; v < graph_.values().size(); ++v) {
      const Value& value = graph_.values()[v];
      needed_[v] = value.kind == Value::Kind::parameter &&
                   std::find(frozen_.begin(), frozen_.end(), value.name) == frozen_.end();
    }
    for (const std::string& name : input_gradients) {
      const std::optional<ValueId> input = graph_.find(name);
      if (!input) throw InvalidArgument("no input is called '{}'", name);
      needed_[static_cast<size_t>(*input)] = true;
    }
    for (const Node& node : graph_.nodes()) {
      const std::vector<int> differentiable = node.op->differentiable_inputs();
      const bool any = is_recv(node) || std::any_of(differentiable.begin(), differentiable.end(), [&](int port) {
                         const ValueId id = node.inputs[static_cast<size_t>(port)];
                         return id != kNoValue && needed_[static_cast<size_t>(id)];
                       });
      for (ValueId id : node.outputs)
        if (id != kNoValue) needed_[static_cast<size_t>(id)] = any;
    }
  }

  // Moves the nodes that add to these parameters' gradients behind all others, which read nothing of theirs.
  void defer(std::span<const std::string> parameters) {
    std::set<ValueId> gradients;
    for (const std::string& name : parameters)
      if (const std::optional<ValueId> id = graph_.find("grad." + name)) gradients.insert(*id);
    const auto makes_one = [&](const Node& node) {
      const auto is_one = [&](ValueId id) { return gradients.contains(id); };
      if (std::none_of(node.outputs.begin(), node.outputs.end(), is_one)) return false;
      for (ValueId id : node.outputs)
        if (id != kNoValue && !is_one(id))
          throw Unsupported("{} makes the gradient of tied weights together with '{}'; the other stage's comes between",
                            describe(node), graph_.value(id).name);
      return true;
    };
    const auto first = std::stable_partition(graph_.nodes().begin() + static_cast<std::ptrdiff_t>(result_.forward_end),
                                             graph_.nodes().end(), [&](const Node& node) { return !makes_one(node); });
    result_.num_deferred = static_cast<size_t>(graph_.nodes().end() - first);
  }

  bool needs_backward(const Node& node) const {
    return std::any_of(node.outputs.begin(), node.outputs.end(),
                       [&](ValueId id) { return id != kNoValue && needed_[static_cast<size_t>(id)]; });
  }

  static bool is_recv(const Node& node) { return dynamic_cast<const ops::Recv*>(node.op.get()) != nullptr; }

  void make_forward(Node& node) {
    // The rounding of a frozen weight, too, is of the forward pass: a backward pass reads what it rounded.
    if (dynamic_cast<const ops::Quantize*>(node.op.get()) != nullptr) node.pass = Pass::forward;
    if (!needs_backward(node) || is_recv(node)) return;
    if (!node.op->has_backward() && !node.op->passes_gradient_through())
      throw Unsupported("{} has no backward pass, so it cannot be trained through", describe(node));
    if (node.op->is_view() || node.op->passes_gradient_through()) return;
    node.pass = Pass::forward;
    for (const TensorType& type : node.op->extra_types(graph_.types_of(node.inputs))) {
      const ValueId extra = graph_.new_activation(fmt::format("{}.{}.saved", node.scope, node.op->name()));
      graph_.value(extra).type = type;
      node.outputs.push_back(extra);
    }
  }

  void add_backward(size_t index) {
    const Node node = graph_.nodes()[index];  // a copy: nodes grow below
    if (const auto* sent = dynamic_cast<const ops::Send*>(node.op.get())) return receive_gradient(node, *sent);
    const std::vector<ops::Port> out_ports = node.op->outputs();
    const size_t num_outputs = out_ports.size();
    std::vector<ValueId> dy;  // of each output that is no index
    for (size_t i = 0; i < num_outputs; ++i)
      if (out_ports[i].role != ops::Port::Role::index)
        dy.push_back(node.outputs[i] == kNoValue ? kNoValue : gradient(node.outputs[i]));
    if (const auto* received = dynamic_cast<const ops::Recv*>(node.op.get()))
      return send_gradient(node, *received, dy[0]);
    if (std::all_of(dy.begin(), dy.end(), [](ValueId id) { return id == kNoValue; })) return;
    for (size_t i = 0, slot = 0; i < num_outputs; ++i) {
      if (out_ports[i].role == ops::Port::Role::index) continue;
      EADEM_CHECK(dy[slot] != kNoValue || out_ports[i].optional, "{}: output {} has no gradient but others do",
                  describe(node), i);
      ++slot;
    }

    const std::vector<int> differentiable = node.op->differentiable_inputs();
    // A sum hands partial gradients on, to be added to others before the ranks exchange them.
    const bool passes_parts = node.op->passes_gradient_through() && !node.op->crosses();
    for (ValueId& id : dy)
      if (!passes_parts) id = whole(id, node.scope, node.layer);
    if (node.op->passes_gradient_through()) {
      for (int port : differentiable) accumulate(node.inputs[static_cast<size_t>(port)], dy[0], node.scope, node.layer);
      return;
    }
    Node backward{.op = node.op, .pass = Pass::backward, .scope = node.scope, .layer = node.layer};
    backward.forward_inputs = node.inputs;
    backward.forward_outputs.assign(node.outputs.begin(),
                                    node.outputs.begin() + static_cast<std::ptrdiff_t>(num_outputs));
    for (const ops::Saved& saved : node.op->saved()) {
      const auto i = static_cast<size_t>(saved.index);
      backward.inputs.push_back(saved.kind == ops::Saved::Kind::input    ? node.inputs[i]
                                : saved.kind == ops::Saved::Kind::output ? node.outputs[i]
                                                                         : node.outputs[num_outputs + i]);
    }
    backward.inputs.insert(backward.inputs.end(), dy.begin(), dy.end());

    const std::vector<ops::Port> in_ports = node.op->inputs();
    const std::vector<TensorType> types = node.op->backward_output_types(graph_.types_of(node.inputs));
    std::vector<std::pair<ValueId, ValueId>> made;  // forward input, its gradient
    const std::vector<int> outputs = node.op->gradient_outputs();
    for (size_t k = 0; k < outputs.size(); ++k) {
      const auto port_index = static_cast<size_t>(outputs[k]);
      const bool of_parameter = in_ports[port_index].role == ops::Port::Role::parameter;
      const ValueId input = of_parameter ? before_rounding(node.inputs[port_index]) : node.inputs[port_index];
      std::vector<ValueId> receivers;  // of this gradient
      for (int port : differentiable)
        if (node.op->shares_gradient_with(port) == outputs[k])
          receivers.push_back(node.inputs[static_cast<size_t>(port)]);
      std::erase_if(receivers, [&](ValueId id) { return id == kNoValue || !needed_[static_cast<size_t>(id)]; });
      if (receivers.empty()) {
        backward.outputs.push_back(kNoValue);
      } else if (graph_.value(input).kind == Value::Kind::parameter) {
        const std::string name = graph_.value(input).name;
        TensorType type = gradient_type(node, input, types[k]);
        // Ranks of these axes have tokens of their own.
        for (MeshAxis axis : {MeshAxis::dp, MeshAxis::ep})
          if (mesh_.size(axis) > 1 && type.over(axis).kind != Sharding::Kind::sharded)
            type.set_over(axis, Sharding::partial());
        backward.outputs.push_back(graph_.add_state("grad." + name, type));
        result_.parameters.push_back(name);
      } else {
        const ValueId dx = graph_.new_activation("d." + graph_.value(input).name);
        graph_.value(dx).type = gradient_type(node, input, types[k]);
        backward.outputs.push_back(dx);
        for (ValueId receiver : receivers) made.emplace_back(receiver, dx);
      }
    }
    push_backward(backward, node.op->gradient_nodes(graph_.types_of(node.inputs)));
    for (const auto& [input, dx] : made) accumulate(input, dx, node.scope, node.layer);
  }

  // One node, or several (Op::gradient_nodes).
  void push_backward(const Node& backward, const std::vector<int>& nodes) {
    const int last = nodes.empty() ? 0 : *std::max_element(nodes.begin(), nodes.end());
    for (int n = 0; n <= last; ++n) {
      Node part = backward;
      for (size_t k = 0; k < nodes.size(); ++k)
        if (nodes[k] != n) part.outputs[k] = kNoValue;
      if (std::any_of(part.outputs.begin(), part.outputs.end(), [](ValueId id) { return id != kNoValue; }))
        graph_.nodes().push_back(std::move(part));
    }
  }

  // The parameter that `weight` was rounded from; `weight` itself if it is no rounded one.
  ValueId before_rounding(ValueId weight) const {
    if (weight == kNoValue || graph_.value(weight).kind == Value::Kind::parameter) return weight;
    for (const Node& node : graph_.nodes())
      if (dynamic_cast<const ops::Quantize*>(node.op.get()) != nullptr && node.outputs[0] == weight &&
          graph_.value(node.inputs[0]).kind == Value::Kind::parameter)
        return node.inputs[0];
    return weight;
  }

  // The gradient of a whole input of an op whose output is divided has a term on every rank; not so over the axis along
  // which the op moves values, in both passes.
  TensorType gradient_type(const Node& node, ValueId input, TensorType type) const {
    for (MeshAxis axis : {MeshAxis::tp, MeshAxis::ep}) {
      const bool divides =
          node.op->crosses() != axis && std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId id) {
            return id != kNoValue && graph_.value(id).type.over(axis).kind == Sharding::Kind::sharded;
          });
      const Sharding own = graph_.value(input).type.over(axis);
      const bool whole = own.kind != Sharding::Kind::sharded;  // so is the gradient of each term of a sum
      type.set_over(axis, !whole ? own : divides ? Sharding::partial() : Sharding::replicated());
    }
    return type;
  }

  // `id`, or its sum over the ranks where it is partial.
  ValueId whole(ValueId id, const std::string& scope, int layer) {
    for (MeshAxis axis : {MeshAxis::tp, MeshAxis::ep}) {
      if (id == kNoValue || graph_.value(id).type.over(axis).kind != Sharding::Kind::partial) continue;
      const auto [found, inserted] = sums_.try_emplace(id, kNoValue);  // several ops may share a sum
      ValueId& sum = found->second;
      if (inserted) {
        sum = graph_.new_activation(graph_.value(id).name + ".all_reduce");
        graph_.value(sum).type = graph_.value(id).type;
        graph_.value(sum).type.set_over(axis, Sharding::replicated());
        graph_.nodes().push_back({.op = std::make_shared<ops::AllReduce>(axis, mesh_.size(axis)),
                                  .inputs = {id},
                                  .outputs = {sum},
                                  .scope = scope,
                                  .layer = layer});
      }
      id = sum;
    }
    return id;
  }

  // The gradient of what a stage sent comes from the stage that received it.
  void receive_gradient(const Node& node, const ops::Send& sent) {
    if (!is_floating(graph_.value(node.inputs[0]).type.dtype)) return;
    const ValueId dx = graph_.new_activation("d." + graph_.value(node.inputs[0]).name);
    graph_.value(dx).type = graph_.value(node.inputs[0]).type;
    graph_.nodes().push_back(
        {.op = std::make_shared<ops::Recv>(sent.collective().over, sent.collective().peer, graph_.value(dx).type),
         .outputs = {dx},
         .scope = node.scope});
    accumulate(node.inputs[0], dx, node.scope);
  }

  void send_gradient(const Node& node, const ops::Recv& received, ValueId dy) {
    if (!is_floating(graph_.value(node.outputs[0]).type.dtype)) return;
    if (dy == kNoValue)
      throw Unsupported("'{}' crosses pipeline stages and does not influence the loss there",
                        graph_.value(node.outputs[0]).name);
    dy = whole(dy, node.scope, node.layer);
    graph_.nodes().push_back({.op = std::make_shared<ops::Send>(received.collective().over, received.collective().peer),
                              .inputs = {dy},
                              .scope = node.scope});
  }

  ValueId gradient(ValueId value) const {
    return static_cast<size_t>(value) < gradients_.size() ? gradients_[static_cast<size_t>(value)] : kNoValue;
  }

  void accumulate(ValueId value, ValueId gradient_part, const std::string& scope, int layer = -1) {
    if (value == kNoValue || static_cast<size_t>(value) >= needed_.size() || !needed_[static_cast<size_t>(value)])
      return;
    if (gradients_.size() <= static_cast<size_t>(value)) gradients_.resize(needed_.size(), kNoValue);
    ValueId& total = gradients_[static_cast<size_t>(value)];
    if (total == kNoValue) {
      total = gradient_part;
      return;
    }
    const TensorType &have = graph_.value(total).type, &more = graph_.value(gradient_part).type;
    if (!(have.sharding == more.sharding && have.expert_sharding == more.expert_sharding)) {
      total = whole(total, scope, layer);
      gradient_part = whole(gradient_part, scope, layer);
    }
    const ValueId sum = graph_.new_activation(graph_.value(gradient_part).name + ".sum");
    graph_.value(sum).type = graph_.value(gradient_part).type;
    graph_.nodes().push_back({.op = std::make_shared<ops::Add>(),
                              .inputs = {total, gradient_part},
                              .outputs = {sum},
                              .scope = scope,
                              .layer = layer});
    total = sum;
  }

  Graph& graph_;
  const Mesh& mesh_;
  std::span<const std::string> frozen_;
  std::map<ValueId, ValueId> sums_;  // of partial gradients
  std::vector<bool> needed_;
  std::vector<ValueId> gradients_;
  Differentiated result_;
};

}  // namespace

Differentiated differentiate(Graph& graph, std::span<const std::string> input_gradients, const Mesh& mesh,
                             std::span<const std::string> frozen, std::span<const std::string> deferred) {
  return Differentiator(graph, mesh, frozen).run(input_gradients, deferred);
}

}  // namespace eadem::pipeline
