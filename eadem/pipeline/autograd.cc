// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/autograd.h"

#include <algorithm>

#include "eadem/ops/elementwise.h"

namespace eadem::pipeline {

namespace {

class Differentiator {
 public:
  Differentiator(Graph& graph, std::span<const std::string> frozen) : graph_(graph), frozen_(frozen) {}

  Differentiated run(std::span<const std::string> input_gradients) {
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
      graph_.mark_output("d." + name, gradient(input));
    }
    result_.forward_end = num_forward;
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
      const bool any = std::any_of(differentiable.begin(), differentiable.end(), [&](int port) {
        const ValueId id = node.inputs[static_cast<size_t>(port)];
        return id != kNoValue && needed_[static_cast<size_t>(id)];
      });
      for (ValueId id : node.outputs)
        if (id != kNoValue) needed_[static_cast<size_t>(id)] = any;
    }
  }

  bool needs_backward(const Node& node) const {
    return std::any_of(node.outputs.begin(), node.outputs.end(),
                       [&](ValueId id) { return id != kNoValue && needed_[static_cast<size_t>(id)]; });
  }

  void make_forward(Node& node) {
    if (!needs_backward(node)) return;
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
    const size_t num_outputs = node.op->outputs().size();
    std::vector<ValueId> dy;
    for (size_t i = 0; i < num_outputs; ++i)
      dy.push_back(node.outputs[i] == kNoValue ? kNoValue : gradient(node.outputs[i]));
    if (std::all_of(dy.begin(), dy.end(), [](ValueId id) { return id == kNoValue; })) return;
    for (size_t i = 0; i < num_outputs; ++i)
      EADEM_CHECK(dy[i] != kNoValue, "{}: output {} has no gradient but others do", describe(node), i);

    const std::vector<int> differentiable = node.op->differentiable_inputs();
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

    const std::vector<TensorType> types = node.op->backward_output_types(graph_.types_of(node.inputs));
    std::vector<std::pair<ValueId, ValueId>> made;  // forward input, its gradient
    for (size_t k = 0; k < differentiable.size(); ++k) {
      const ValueId input = node.inputs[static_cast<size_t>(differentiable[k])];
      if (input == kNoValue || !needed_[static_cast<size_t>(input)]) {
        backward.outputs.push_back(kNoValue);
      } else if (graph_.value(input).kind == Value::Kind::parameter) {
        const std::string name = graph_.value(input).name;
        TensorType type = types[k];
        type.encoding = nullptr;
        backward.outputs.push_back(graph_.add_state("grad." + name, type));
        result_.parameters.push_back(name);
      } else {
        const ValueId dx = graph_.new_activation("d." + graph_.value(input).name);
        graph_.value(dx).type = types[k];
        backward.outputs.push_back(dx);
        made.emplace_back(input, dx);
      }
    }
    graph_.nodes().push_back(std::move(backward));
    for (const auto& [input, dx] : made) accumulate(input, dx, node.scope, node.layer);
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
  std::span<const std::string> frozen_;
  std::vector<bool> needed_;
  std::vector<ValueId> gradients_;
  Differentiated result_;
};

}  // namespace

Differentiated differentiate(Graph& graph, std::span<const std::string> input_gradients,
                             std::span<const std::string> frozen) {
  return Differentiator(graph, frozen).run(input_gradients);
}

}  // namespace eadem::pipeline
