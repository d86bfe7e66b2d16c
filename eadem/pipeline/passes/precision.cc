// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/precision.h"

#include <algorithm>
#include <map>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/quantize.h"
#include "eadem/pipeline/passes/kernel_cover.h"
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

namespace {

// The encodings that the kernel of a node wants of its inputs; null where it takes the input as it is. Empty: of all.
std::vector<const Encoding*> wanted_encodings(const Graph& graph, const Node& node, const Device& device,
                                              const SymbolValues& bounds) {
  const kernels::KernelList kernels = kernels_of(node, node.pass, device);
  const auto rounds = [](const kernels::Kernel* kernel) { return kernel->wanted_encoding != nullptr; };
  if (node.op->is_view() || std::none_of(kernels.begin(), kernels.end(), rounds)) return {};
  const KernelChoice choice = decide(graph, node, node.pass, device, bounds);
  if (choice.kernel == nullptr || choice.kernel->wanted_encoding == nullptr) return {};
  const kernels::KernelRequest request = choice.request(node, node.pass, device, bounds);
  std::vector<const Encoding*> wanted;
  for (size_t port = 0; port < node.inputs.size(); ++port)
    wanted.push_back(choice.kernel->wanted_encoding(request, static_cast<int>(port)));
  return wanted;
}

// The name of an input port in the pass of a node.
std::string_view port_name(const Node& node, size_t port) {
  if (node.pass != Pass::backward) return node.op->inputs()[port].name;
  const std::vector<ops::Saved> saved = node.op->saved();
  if (port < saved.size() && saved[port].kind == ops::Saved::Kind::input)
    return node.op->inputs()[static_cast<size_t>(saved[port].index)].name;
  return port < saved.size() ? "saved" : "dy";
}

}  // namespace

void insert_quantize(Graph& graph, const Device& device, const SymbolValues& bounds, bool training,
                     size_t& forward_end) {
  std::vector<Node> old_nodes = std::move(graph.nodes());
  graph.nodes().clear();
  std::map<std::pair<ValueId, const Encoding*>, ValueId> rounded;
  std::map<ValueId, std::string> scopes;  // of the nodes that make values
  size_t inserted_forward = 0;
  for (size_t n = 0; n < old_nodes.size(); ++n) {
    Node& node = old_nodes[n];
    const std::vector<const Encoding*> wanted = wanted_encodings(graph, node, device, bounds);
    for (size_t port = 0; port < wanted.size(); ++port) {
      const ValueId id = node.inputs[port];
      if (id == kNoValue || wanted[port] == nullptr || graph.value(id).type.encoding == wanted[port]) continue;
      auto [found, inserted] = rounded.try_emplace({id, wanted[port]}, kNoValue);
      if (inserted) {
        found->second = graph.new_activation(graph.value(id).name + "." + std::string(wanted[port]->name()));
        std::vector<ValueId> inputs = {id}, outputs = {found->second};
        if (ops::Quantize::has_scaling(wanted[port])) {
          const std::string name = ops::Quantize::scaling_name(fmt::format("{}.{}", node.scope, port_name(node, port)));
          inputs.push_back(graph.add_state(name, ops::Quantize::scaling_type()));
          outputs.push_back(graph.new_activation(name + ".seen"));
        }
        graph.nodes().push_back({.op = std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{wanted[port]}),
                                 .pass = training ? Pass::forward : Pass::inference,
                                 .inputs = std::move(inputs),
                                 .outputs = std::move(outputs),
                                 .scope = scopes.contains(id) ? scopes[id] : node.scope,
                                 .layer = node.layer});
        infer_node_types(graph, graph.nodes().back());
        if (n < forward_end) ++inserted_forward;
      }
      node.inputs[port] = found->second;
    }
    for (const ValueId output : node.outputs)
      if (output != kNoValue) scopes[output] = node.scope;
    graph.nodes().push_back(std::move(node));
  }
  forward_end += inserted_forward;
}

RoundingCount count_rounding(const Graph& graph, const SymbolValues& symbols) {
  RoundingCount count;
  const auto bytes_of = [&](ValueId id) {
    if (id == kNoValue || graph.value(id).kind != Value::Kind::activation || graph.value(id).type.encoding == nullptr)
      return 0.0;
    return static_cast<double>(graph.value(id).type.size_bytes(symbols));
  };
  for (const Node& node : graph.nodes()) {
    for (const ValueId id : node.outputs)
      if (const double bytes = bytes_of(id); bytes > 0) ++count.values, count.bytes += bytes;
    for (const ValueId id : node.inputs)
      if (const double bytes = bytes_of(id); bytes > 0) ++count.readers, count.bytes_if_alone += bytes;
  }
  return count;
}

}  // namespace eadem::pipeline
