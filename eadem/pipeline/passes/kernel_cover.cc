// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/kernel_cover.h"

namespace eadem::pipeline {

namespace {

// The port types of `pass` for a node whose inputs and outputs are those of its forward or inference pass.
void derive_port_types(const Graph& graph, const Node& node, Pass pass, KernelChoice& choice) {
  choice.inputs = graph.types_of(node.inputs);
  choice.outputs = graph.types_of(node.outputs);
  if (pass == node.pass) return;
  EADEM_CHECK(node.pass == Pass::inference, "{}: ports of {} derived from {}", node.op->name(),
              kernels::pass_name(pass), kernels::pass_name(node.pass));
  if (pass == Pass::forward) {
    const std::vector<TensorType> extra = node.op->extra_types(choice.inputs);
    choice.outputs.insert(choice.outputs.end(), extra.begin(), extra.end());
  } else if (pass == Pass::backward) {
    const std::vector<TensorType> inputs = node.op->backward_input_types(choice.inputs, choice.outputs);
    choice.outputs = node.op->backward_output_types(choice.inputs);
    choice.inputs = inputs;
  }
}

// Refuses the chosen kernel while it wants something packed that is no parameter, and takes the cheapest of the others:
// packing is for what changes rarely.
void refuse_packing_of_activations(const Graph& graph, const Node& node, Pass pass, const kernels::KernelList& kernels,
                                   const kernels::KernelRequest& request, KernelChoice& choice) {
  std::vector<ValueId> ports = node.inputs;
  if (pass != node.pass && pass == Pass::backward) {
    ports.clear();
    for (const ops::Saved& saved : node.op->saved())
      ports.push_back(saved.kind == ops::Saved::Kind::input ? node.inputs[static_cast<size_t>(saved.index)] : kNoValue);
  }
  const auto packs_activation = [&](const kernels::Kernel& kernel) {
    if (kernel.packing == nullptr) return false;
    for (size_t port = 0; port < ports.size(); ++port)
      if (ports[port] != kNoValue && graph.value(ports[port]).kind != Value::Kind::parameter &&
          kernel.packing(request, static_cast<int>(port)) != nullptr)
        return true;
    return false;
  };
  std::vector<Decision::Answer>& answers = choice.decision.answers;
  while (choice.kernel != nullptr && packs_activation(*choice.kernel)) {
    answers[*choice.decision.chosen].verdict = Verdict::no("packs its weight, which is no parameter");
    choice.kernel = nullptr;
    choice.decision.chosen.reset();
    for (size_t i = 0; i < answers.size(); ++i)
      if (answers[i].verdict.accepted &&
          (choice.kernel == nullptr || answers[i].verdict.cost_us < answers[*choice.decision.chosen].verdict.cost_us)) {
        choice.kernel = kernels[i];
        choice.decision.chosen = i;
      }
  }
}

}  // namespace

kernels::KernelRequest KernelChoice::request(const Node& node, Pass pass, const Device& device,
                                             const SymbolValues& bounds) const {
  return {.op = node.op->name(),
          .pass = pass,
          .device = &device,
          .attrs = node.op->attrs(),
          .inputs = inputs,
          .outputs = outputs,
          .bounds = bounds,
          .cost = cost,
          .definition = node.op.get()};
}

kernels::KernelList kernels_of(const Node& node, Pass pass, const Device& device) {
  kernels::KernelList result;
  for (const kernels::Kernel* kernel : node.op->kernels(kernels::backend_of(device)))
    if (kernel->pass == pass) result.push_back(kernel);
  return result;
}

KernelChoice decide(const Graph& graph, const Node& node, Pass pass, const Device& device, const SymbolValues& bounds) {
  KernelChoice choice;
  choice.decision.subject = fmt::format("{} {}", describe(node), kernels::pass_name(pass));
  derive_port_types(graph, node, pass, choice);
  // An op states the cost of every pass in terms of its own ports.
  const bool backward_node = node.pass == Pass::backward;
  const std::vector<TensorType> own_inputs = graph.types_of(backward_node ? node.forward_inputs : node.inputs);
  std::vector<TensorType> own_outputs = graph.types_of(backward_node ? node.forward_outputs : node.outputs);
  own_outputs.resize(node.op->outputs().size());  // without the extra tensors of a forward node
  choice.cost = node.op->cost(pass, own_inputs, own_outputs, bounds);
  const kernels::KernelList kernels = kernels_of(node, pass, device);
  const kernels::KernelRequest request = choice.request(node, pass, device, bounds);
  choice.kernel = select<kernels::Kernel>(kernels, request, choice.decision);
  refuse_packing_of_activations(graph, node, pass, kernels, request, choice);
  return choice;
}

std::vector<KernelChoice> cover(const Graph& graph, const Device& device, const SymbolValues& bounds) {
  std::vector<KernelChoice> choices;
  for (const Node& node : graph.nodes())
    choices.push_back(node.op->is_view() ? KernelChoice{} : decide(graph, node, node.pass, device, bounds));
  return choices;
}

void require_complete(const Graph& graph, std::span<const KernelChoice> choices, const Device& device) {
  constexpr size_t kMaxListed = 8;
  std::string listed;
  size_t num_missing = 0;
  for (size_t n = 0; n < choices.size(); ++n) {
    if (graph.nodes()[n].op->is_view() || choices[n].kernel != nullptr) continue;
    if (++num_missing <= kMaxListed) listed += to_string(choices[n].decision);
  }
  if (num_missing > 0)
    throw Unsupported("{} of {} ops have no kernel on {}:\n{}{}", num_missing, choices.size(), device.description(),
                      listed, num_missing > kMaxListed ? "and more\n" : "");
}

}  // namespace eadem::pipeline
