// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/packing_choice.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

namespace eadem::pipeline {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// A layout in which a kernel reads a parameter.
struct Layout {
  std::string parameter;
  const Encoding* packing;  // null: as it is declared
};

// A kernel that accepts a node.
struct Option {
  size_t answer;  // index into the decision's answers
  const kernels::Kernel* kernel;
  double cost_us;
  std::vector<Layout> layouts;
};

// A node that reads parameters.
struct NodeOptions {
  KernelChoice* choice;
  std::vector<Option> options;
};

// The layouts in which each parameter may be read; a parameter that is not listed, in any.
using Allowed = std::map<std::string, std::set<const Encoding*>>;

std::string_view layout_name(const Encoding* packing) { return packing == nullptr ? "it is stored" : packing->name(); }

// The first layout of an option that is not allowed, or null.
const Layout* missing_layout(const Option& option, const Allowed& allowed) {
  for (const Layout& layout : option.layouts) {
    const auto found = allowed.find(layout.parameter);
    if (found != allowed.end() && !found->second.contains(layout.packing)) return &layout;
  }
  return nullptr;
}

// The cheapest option that reads only allowed layouts; of equals the first. Null: there is none.
const Option* cheapest(const NodeOptions& node, const Allowed& allowed) {
  const Option* best = nullptr;
  for (const Option& option : node.options)
    if (missing_layout(option, allowed) == nullptr && (best == nullptr || option.cost_us < best->cost_us))
      best = &option;
  return best;
}

std::optional<NodeOptions> options_of(const PackingReader& reader, size_t n) {
  const Node& node = reader.graph->nodes()[n];
  KernelChoice& choice = (*reader.choices)[n];
  if (choice.kernel == nullptr) return std::nullopt;
  std::vector<std::pair<int, std::string>> ports;
  for (size_t port = 0; port < node.inputs.size(); ++port) {
    const ValueId id = node.inputs[port];
    if (id != kNoValue && reader.graph->value(id).kind == Value::Kind::parameter)
      ports.emplace_back(static_cast<int>(port), reader.graph->value(id).name);
  }
  if (ports.empty()) return std::nullopt;
  NodeOptions result{&choice, {}};
  const kernels::KernelRequest request = choice.request(node, node.pass, *reader.device, reader.bounds);
  const kernels::KernelList kernels = kernels_of(node, node.pass, *reader.device);
  for (size_t i = 0; i < kernels.size(); ++i) {
    const Verdict& verdict = choice.decision.answers[i].verdict;
    if (!verdict.accepted) continue;
    Option option{i, kernels[i], verdict.cost_us, {}};
    for (const auto& [port, parameter] : ports)
      option.layouts.push_back(
          {parameter, kernels[i]->packing == nullptr ? nullptr : kernels[i]->packing(request, port)});
    result.options.push_back(std::move(option));
  }
  return result;
}

// The modelled time of all nodes; infinite if one of them has no option.
double total_us(const std::vector<const NodeOptions*>& nodes, const Allowed& allowed) {
  double total = 0;
  for (const NodeOptions* node : nodes) {
    const Option* option = cheapest(*node, allowed);
    total += option == nullptr ? kNever : option->cost_us;
  }
  return total;
}

// Decides on a layout of `parameter`, which `nodes` read, and adds it to `allowed`, if one serves all of them.
void agree_on(const std::string& parameter, const std::vector<const NodeOptions*>& nodes, Allowed& allowed) {
  std::vector<const Encoding*> layouts;  // in the order of the lists of kernels
  for (const NodeOptions* node : nodes)
    for (const Option& option : node->options)
      for (const Layout& layout : option.layouts)
        if (layout.parameter == parameter && std::find(layouts.begin(), layouts.end(), layout.packing) == layouts.end())
          layouts.push_back(layout.packing);
  double best_us = kNever;
  std::set<const Encoding*> best;
  for (const Encoding* layout : layouts) {
    allowed[parameter] = {layout};
    const double us = total_us(nodes, allowed);
    if (us < best_us) best_us = us, best = {layout};
  }
  if (best.empty())
    allowed.erase(parameter);
  else
    allowed[parameter] = best;
}

// Chooses among the options that read allowed layouts, or among all if none does.
void choose(const NodeOptions& node, const Allowed& allowed) {
  const Option* option = cheapest(node, allowed);
  if (option == nullptr) return;
  node.choice->kernel = option->kernel;
  node.choice->decision.chosen = option->answer;
  for (const Option& other : node.options)
    if (const Layout* layout = missing_layout(other, allowed))
      node.choice->decision.answers[other.answer].verdict =
          Verdict::no(fmt::format("reads '{}' as {}; it is kept as {}", layout->parameter, layout_name(layout->packing),
                                  layout_name(*allowed.at(layout->parameter).begin())));
}

}  // namespace

void agree_on_packings(std::span<const PackingReader> readers, const ParameterStore& parameters) {
  std::vector<NodeOptions> nodes;
  for (const PackingReader& reader : readers)
    for (size_t n = 0; n < reader.choices->size(); ++n)
      if (std::optional<NodeOptions> node = options_of(reader, n)) nodes.push_back(std::move(*node));
  std::map<std::string, std::vector<const NodeOptions*>> nodes_of;
  for (const NodeOptions& node : nodes)
    for (const Layout& layout : node.options.front().layouts) {
      std::vector<const NodeOptions*>& list = nodes_of[layout.parameter];
      if (list.empty() || list.back() != &node) list.push_back(&node);
    }
  // Forms that earlier programs read are kept in any case.
  Allowed allowed;
  for (const auto& [parameter, list] : nodes_of) {
    const std::vector<const Encoding*> held = parameters.packings(parameter);
    if (held.empty()) continue;
    allowed[parameter] = {held.begin(), held.end()};
    if (total_us(list, allowed) == kNever) allowed.erase(parameter);
  }
  for (const auto& [parameter, list] : nodes_of)
    if (!allowed.contains(parameter)) agree_on(parameter, list, allowed);
  for (const NodeOptions& node : nodes) choose(node, allowed);
}

}  // namespace eadem::pipeline
