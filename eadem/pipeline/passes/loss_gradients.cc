// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/loss_gradients.h"

#include <algorithm>

#include "eadem/pipeline/passes/kernel_cover.h"

namespace eadem::pipeline {

namespace {

bool reads(const Node& node, const Node& maker) {
  return std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
    return id != kNoValue && std::find(maker.outputs.begin(), maker.outputs.end(), id) != maker.outputs.end();
  });
}

// The backward node with the outputs of `forward`, without its extra tensors.
Node joined(const Node& forward, const Node& backward) {
  Node node = backward;
  const size_t num_outputs = node.op->outputs().size();
  for (ValueId& id : node.inputs)
    if (std::find(forward.outputs.begin() + static_cast<std::ptrdiff_t>(num_outputs), forward.outputs.end(), id) !=
        forward.outputs.end())
      id = kNoValue;
  node.outputs.insert(node.outputs.end(), forward.outputs.begin(),
                      forward.outputs.begin() + static_cast<std::ptrdiff_t>(num_outputs));
  return node;
}

bool gradients_are_inputs(const Graph& graph, const Node& backward) {
  const auto first = backward.inputs.begin() + static_cast<std::ptrdiff_t>(backward.op->saved().size());
  return std::all_of(first, backward.inputs.end(),
                     [&](ValueId id) { return id != kNoValue && graph.value(id).kind == Value::Kind::input; });
}

}  // namespace

void join_losses(Graph& graph, const Device& device, const SymbolValues& bounds, size_t& forward_end) {
  std::vector<Node>& nodes = graph.nodes();
  for (size_t f = forward_end; f-- > 0;) {
    if (nodes[f].pass != Pass::forward || !nodes[f].op->backward_makes_outputs()) continue;
    size_t num_readers = 0, backward = 0;
    for (size_t n = f + 1; n < nodes.size(); ++n)
      if (reads(nodes[n], nodes[f])) ++num_readers, backward = n;
    if (num_readers != 1 || nodes[backward].pass != Pass::backward || nodes[backward].op != nodes[f].op ||
        !gradients_are_inputs(graph, nodes[backward]))
      continue;
    const Node node = joined(nodes[f], nodes[backward]);
    if (decide(graph, node, Pass::backward, device, bounds).kernel == nullptr) continue;
    nodes[backward] = node;
    nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(f));
    --forward_end;
  }
}

}  // namespace eadem::pipeline
