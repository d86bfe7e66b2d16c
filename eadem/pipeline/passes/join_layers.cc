// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/join_layers.h"

#include <algorithm>

#include "eadem/fusions/decoder_layers.h"
#include "eadem/pipeline/passes/kernel_cover.h"
#include "eadem/pipeline/passes/type_inference.h"

namespace eadem::pipeline {

namespace {

using Ports = kernels::DecoderLayerPorts;

// How many nodes read each value; an output of the graph is read by the caller.
std::vector<int> count_readers(const Graph& graph) {
  std::vector<int> readers(graph.values().size(), 0);
  for (const Node& node : graph.nodes())
    for (ValueId id : node.inputs)
      if (id != kNoValue) ++readers[static_cast<size_t>(id)];
  for (const GraphOutput& output : graph.outputs()) ++readers[static_cast<size_t>(output.value)];
  return readers;
}

// `run`, layers that may be joined already, with `layer` behind them; nothing where `layer` does not follow.
std::optional<Node> joined(const Node& run, const Node& layer, const std::vector<int>& readers) {
  if (run.pass != layer.pass) return std::nullopt;
  ops::OpPtr op = fusions::join_decoder_layers(*run.op, *layer.op);
  if (op == nullptr) return std::nullopt;
  if (layer.inputs[Ports::kX] != run.outputs[0] || readers[static_cast<size_t>(run.outputs[0])] != 1)
    return std::nullopt;
  for (size_t port = Ports::kX + 1; port < Ports::kSharedInputs; ++port)
    if (layer.inputs[port] != run.inputs[port]) return std::nullopt;
  // Each layer has caches of its own.
  for (const auto port : {Ports::kCacheK, Ports::kCacheV})
    for (const std::vector<ValueId>* own : {&run.inputs, &run.outputs})
      if (std::find(own->begin(), own->end(), layer.inputs[Ports::input(0, port)]) != own->end()) return std::nullopt;
  Node node = run;
  node.op = std::move(op);
  node.inputs.insert(node.inputs.end(), layer.inputs.begin() + Ports::kSharedInputs, layer.inputs.end());
  node.outputs[0] = layer.outputs[0];
  node.outputs.insert(node.outputs.end(), layer.outputs.begin() + 1, layer.outputs.end());
  node.first_layer = run.first_layer >= 0 ? run.first_layer : run.layer;
  node.layer = layer.layer;
  return node;
}

std::string scope_of(const Node& first, const Node& last) { return fmt::format("{} - {}", first.scope, last.scope); }

void check_types(Graph& graph, const Node& node) {
  const std::vector<TensorType> types = graph.types_of(node.outputs);
  infer_node_types(graph, node);
  for (size_t i = 0; i < types.size(); ++i)
    EADEM_CHECK(graph.value(node.outputs[i]).type == types[i], "{}: output {} is {} but the layers made {}",
                describe(node), i, to_string(graph.value(node.outputs[i]).type), to_string(types[i]));
}

}  // namespace

std::vector<FusionDecision> join_layers(Graph& graph, const Device& device, const SymbolValues& bounds,
                                        const std::vector<std::string>& disabled) {
  const bool is_off = std::any_of(disabled.begin(), disabled.end(), [](const std::string& name) {
    return name == "all" || name == fusions::kDecoderLayers;
  });
  const std::vector<int> readers = count_readers(graph);
  std::vector<FusionDecision> decisions;
  std::vector<Node> nodes;
  for (size_t n = 0; n < graph.nodes().size();) {
    Node run = graph.nodes()[n];
    FusionDecision decision{.fusion = std::string(fusions::kDecoderLayers), .scope = run.scope};
    std::optional<FusionDecision> refused;
    size_t end = n + 1;
    for (; end < graph.nodes().size(); ++end) {
      const Node& layer = graph.nodes()[end];
      std::optional<Node> longer = joined(run, layer, readers);
      if (!longer) break;
      longer->scope = scope_of(graph.nodes()[n], layer);
      refused = FusionDecision{.fusion = decision.fusion, .scope = longer->scope, .reason = "switched off"};
      if (is_off) break;
      const Decision choice = decide(graph, *longer, longer->pass, device, bounds).decision;
      refused->reason = choice.answers.empty() ? fmt::format("no kernel on {}", device.backend()) : to_string(choice);
      if (!choice.chosen) break;
      refused.reset();
      decision.kept_inside.push_back(graph.value(run.outputs[0]).name);
      decision.scope = longer->scope;
      run = std::move(*longer);
    }
    if (end > n + 1) {
      check_types(graph, run);
      decision.applied = true;
      decisions.push_back(std::move(decision));
    }
    if (refused) decisions.push_back(std::move(*refused));
    nodes.push_back(std::move(run));
    n = end;
  }
  graph.nodes() = std::move(nodes);
  return decisions;
}

}  // namespace eadem::pipeline
