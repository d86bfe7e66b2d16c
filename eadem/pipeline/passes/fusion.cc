// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/fusion.h"

#include <algorithm>
#include <map>

#include "eadem/fusions/decoder_layers.h"
#include "eadem/fusions/fusion.h"
#include "eadem/pipeline/passes/kernel_cover.h"
#include "eadem/pipeline/passes/type_inference.h"

namespace eadem::pipeline {

namespace {

using fusions::Fusion;
using fusions::PatternNode;

// The producer and the consumers of each value of a graph.
struct Uses {
  explicit Uses(const Graph& graph)
      : producer(graph.values().size(), -1), consumers(graph.values().size()), is_output(graph.values().size()) {
    for (size_t n = 0; n < graph.nodes().size(); ++n) {
      for (ValueId id : graph.nodes()[n].outputs)
        if (id != kNoValue) producer[static_cast<size_t>(id)] = static_cast<int>(n);
      for (ValueId id : graph.nodes()[n].inputs)
        if (id != kNoValue) consumers[static_cast<size_t>(id)].push_back(static_cast<int>(n));
    }
    for (const GraphOutput& output : graph.outputs()) is_output[static_cast<size_t>(output.value)] = true;
  }
  std::vector<int> producer;
  std::vector<std::vector<int>> consumers;
  std::vector<bool> is_output;
};

struct Match {
  std::vector<int> nodes;         // graph node of each pattern node
  std::map<int, ValueId> values;  // pattern value -> graph value
  int place = 0;                  // the graph node before which the fused op is put
};

// Matches a pattern backwards from its last node: producers are found through the values that nodes read, and then
// nodes that read a value of those found.
class Matcher {
 public:
  Matcher(const Graph& graph, const Uses& uses, const Fusion& fusion) : graph_(graph), uses_(uses), fusion_(fusion) {}

  // The first closed match among all ways to exchange the operands of commutative nodes.
  std::optional<Match> match_at(int root) {
    uint32_t commutative = 0;
    for (size_t n = 0; n < fusion_.nodes.size(); ++n)
      if (fusion_.nodes[n].commutative) commutative |= uint32_t{1} << n;
    // Every subset of the bits of `commutative`, from none to all of them.
    exchanged_ = 0;
    do {
      match_ = Match{std::vector<int>(fusion_.nodes.size(), -1), {}, root};
      if (match_node(static_cast<int>(fusion_.nodes.size()) - 1, root) && match_siblings(root) && is_closed())
        return match_;
      exchanged_ = (exchanged_ - commutative) & commutative;
    } while (exchanged_ != 0);
    return std::nullopt;
  }

 private:
  bool match_node(int pattern_index, int node_index) {
    const PatternNode& pattern = fusion_.nodes[static_cast<size_t>(pattern_index)];
    const Node& node = graph_.nodes()[static_cast<size_t>(node_index)];
    if (node.op->name() != pattern.op || (node.pass == Pass::backward) != pattern.backward ||
        node.inputs.size() != pattern.inputs.size() || node.outputs.size() != pattern.outputs.size())
      return false;
    if (std::find(match_.nodes.begin(), match_.nodes.end(), node_index) != match_.nodes.end()) return false;
    match_.nodes[static_cast<size_t>(pattern_index)] = node_index;
    for (size_t i = 0; i < pattern.outputs.size(); ++i)
      if (!bind(pattern.outputs[i], node.outputs[i])) return false;
    const bool exchange = (exchanged_ >> pattern_index & 1) != 0;
    for (size_t i = 0; i < pattern.inputs.size(); ++i)
      if (!match_input(pattern.inputs[i], node.inputs[exchange && i < 2 ? 1 - i : i])) return false;
    return true;
  }

  bool match_input(int wanted, ValueId actual) {
    if (wanted < 0) return actual == kNoValue;
    const auto& optional = fusion_.optional_inputs;
    if (actual == kNoValue && std::find(optional.begin(), optional.end(), wanted) == optional.end()) return false;
    const int maker = pattern_producer(wanted);
    if (maker >= 0 && match_.nodes[static_cast<size_t>(maker)] < 0) {
      const int producer = actual == kNoValue ? -1 : uses_.producer[static_cast<size_t>(actual)];
      if (producer < 0 || !match_node(maker, producer)) return false;
    }
    return bind(wanted, actual);
  }

  // Finds the nodes that only a common input connects to the others: the last such reader before the root.
  bool match_siblings(int root) {
    for (int pattern_index = static_cast<int>(fusion_.nodes.size()) - 1; pattern_index >= 0; --pattern_index)
      if (match_.nodes[static_cast<size_t>(pattern_index)] < 0 && !match_sibling(pattern_index, root)) return false;
    return true;
  }

  bool match_sibling(int pattern_index, int root) {
    for (int value : fusion_.nodes[static_cast<size_t>(pattern_index)].inputs) {
      const auto found = match_.values.find(value);
      if (found == match_.values.end() || found->second == kNoValue) continue;
      const std::vector<int>& readers = uses_.consumers[static_cast<size_t>(found->second)];
      for (auto reader = readers.rbegin(); reader != readers.rend(); ++reader) {
        if (*reader >= root || is_inside(*reader)) continue;
        const Match before = match_;
        if (match_node(pattern_index, *reader)) return true;
        match_ = before;
      }
    }
    return false;
  }

  int pattern_producer(int value) const {
    for (size_t n = 0; n < fusion_.nodes.size(); ++n)
      for (int output : fusion_.nodes[n].outputs)
        if (output == value) return static_cast<int>(n);
    return -1;
  }

  bool bind(int pattern_value, ValueId actual) {
    const auto [found, inserted] = match_.values.try_emplace(pattern_value, actual);
    return inserted || found->second == actual;
  }

  // No value made inside is wanted outside, unless the fused op makes it too; the fused op reads nothing that is made
  // inside, as it would of p + p. It is put before the first reader of its outputs, where its inputs must be made.
  bool is_closed() {
    for (size_t n = 0; n < fusion_.nodes.size(); ++n)
      for (int pattern_value : fusion_.nodes[n].outputs) {
        const auto id = static_cast<size_t>(match_.values.at(pattern_value));
        const bool kept =
            std::find(fusion_.outputs.begin(), fusion_.outputs.end(), pattern_value) != fusion_.outputs.end();
        if (uses_.is_output[id] && !kept) return false;
        for (int consumer : uses_.consumers[id]) {
          if (is_inside(consumer)) continue;
          if (!kept) return false;
          match_.place = std::min(match_.place, consumer);
        }
      }
    for (int pattern_value : fusion_.inputs) {
      const auto found = match_.values.find(pattern_value);
      const ValueId id = found == match_.values.end() ? kNoValue : found->second;
      if (id == kNoValue) continue;
      const int producer = uses_.producer[static_cast<size_t>(id)];
      if (is_inside(producer) || producer >= match_.place) return false;
    }
    return true;
  }

  bool is_inside(int node) const {
    return std::find(match_.nodes.begin(), match_.nodes.end(), node) != match_.nodes.end();
  }

  const Graph& graph_;
  const Uses& uses_;
  const Fusion& fusion_;
  uint32_t exchanged_ = 0;  // bit n: the operands of pattern node n are exchanged
  Match match_;
};

// The fused node for a match, with types inferred, or the reason why there is none.
std::optional<Node> make_fused(Graph& graph, const Fusion& fusion, const Match& match, const Device& device,
                               const SymbolValues& bounds, bool training, std::string& reason) {
  std::vector<const ops::Op*> matched;
  for (int index : match.nodes) matched.push_back(graph.nodes()[static_cast<size_t>(index)].op.get());
  Node node = graph.nodes()[static_cast<size_t>(match.nodes.back())];
  node.op = fusion.make(matched);
  if (node.op == nullptr) {
    reason = "attributes of the matched ops do not fit";
    return std::nullopt;
  }
  // An op of the pattern may stand outside of all modules.
  for (auto index = match.nodes.rbegin(); node.scope.empty() && index != match.nodes.rend(); ++index)
    node.scope = graph.nodes()[static_cast<size_t>(*index)].scope;
  node.inputs.clear();
  for (int value : fusion.inputs) {
    const auto found = match.values.find(value);
    node.inputs.push_back(found == match.values.end() ? kNoValue : found->second);
  }
  node.outputs.clear();
  for (int value : fusion.outputs) node.outputs.push_back(match.values.at(value));
  const std::vector<TensorType> types = graph.types_of(node.outputs);
  try {
    infer_node_types(graph, node);
  } catch (const InvalidArgument& error) {
    reason = error.what();
    return std::nullopt;
  }
  for (size_t i = 0; i < types.size(); ++i)
    EADEM_CHECK(graph.value(node.outputs[i]).type == types[i], "{}: output {} is {} but the pattern made {}",
                fusion.name, i, to_string(graph.value(node.outputs[i]).type), to_string(types[i]));
  for (Pass pass : fusion.after_autograd ? std::vector{node.pass}
                   : training            ? std::vector{Pass::forward, Pass::backward}
                                         : std::vector{Pass::inference}) {
    const Decision decision = decide(graph, node, pass, device, bounds).decision;
    if (!decision.chosen) {
      reason = decision.answers.empty() ? fmt::format("no kernel on {}", device.backend()) : to_string(decision);
      return std::nullopt;
    }
  }
  return node;
}

void check_names(const std::vector<std::string>& disabled) {
  for (const std::string& name : disabled) {
    bool known = name == "all";
    std::string names = "all";
    for (const Fusion* fusion : fusions::all_fusions()) {
      known = known || fusion->name == name;
      names += ", " + std::string(fusion->name);
    }
    known = known || name == fusions::kDecoderLayers;  // joined by another pass
    names += ", " + std::string(fusions::kDecoderLayers);
    if (!known) throw InvalidArgument("no fusion is called '{}'; there are: {}", name, names);
  }
}

// Replaces matches of `fusion` whose last nodes are at or after `start`, in their order, as long as each begins behind
// the last node of the one before: what it consists of and who reads it is then as before. Returns the node to go on
// from, or nothing.
std::optional<size_t> fuse_some(Graph& graph, const Fusion& fusion, size_t start, const Device& device,
                                const SymbolValues& bounds, const FusionOptions& options, bool disabled,
                                std::vector<FusionDecision>& decisions, size_t& forward_end) {
  const Uses uses(graph);
  Matcher matcher(graph, uses, fusion);
  std::vector<std::pair<Match, Node>> found;
  std::optional<size_t> stop;
  for (size_t root = start; root < graph.nodes().size() && !stop; ++root) {
    std::optional<Match> match = matcher.match_at(static_cast<int>(root));
    if (!match) continue;
    if (!found.empty() &&
        *std::min_element(match->nodes.begin(), match->nodes.end()) <= found.back().first.nodes.back()) {
      stop = root;
      continue;
    }
    FusionDecision decision{std::string(fusion.name), graph.nodes()[root].scope, false, {}};
    std::optional<Node> fused;
    if (disabled)
      decision.reason = "switched off";
    else
      fused = make_fused(graph, fusion, *match, device, bounds, options.training, decision.reason);
    decision.applied = fused.has_value();
    if (fused)
      for (const PatternNode& pattern : fusion.nodes)
        for (const int value : pattern.outputs)
          if (std::find(fusion.outputs.begin(), fusion.outputs.end(), value) == fusion.outputs.end())
            decision.kept_inside.push_back(graph.value(match->values.at(value)).name);
    decisions.push_back(std::move(decision));
    if (fused) found.emplace_back(std::move(*match), std::move(*fused));
  }
  if (found.empty()) return std::nullopt;
  std::vector<Node> nodes;
  size_t next = 0, new_forward_end = forward_end;
  auto each = found.begin();
  for (size_t n = 0; n < graph.nodes().size(); ++n) {
    const auto node = static_cast<int>(n);
    if (n == forward_end) new_forward_end = nodes.size();
    if (n == stop) next = nodes.size();
    if (each != found.end() && node == each->first.place) nodes.push_back(std::move(each->second));
    if (each == found.end() ||
        std::find(each->first.nodes.begin(), each->first.nodes.end(), node) == each->first.nodes.end())
      nodes.push_back(std::move(graph.nodes()[n]));
    if (each != found.end() && node == each->first.nodes.back()) ++each;
  }
  if (forward_end >= graph.nodes().size()) new_forward_end = nodes.size();
  forward_end = new_forward_end;
  graph.nodes() = std::move(nodes);
  return stop ? std::optional(next) : std::nullopt;
}

}  // namespace

std::vector<FusionDecision> fuse(Graph& graph, const Device& device, const SymbolValues& bounds,
                                 const FusionOptions& options, size_t* forward_end) {
  size_t end = forward_end == nullptr ? graph.nodes().size() : *forward_end;
  check_names(options.disabled);
  std::vector<FusionDecision> decisions;
  for (const Fusion* fusion : fusions::all_fusions()) {
    const bool in_training = options.after_rounding ? fusion->after_autograd : fusion->in_training;
    if (options.training ? !in_training : !fusion->in_inference) continue;
    if (fusion->after_rounding != options.after_rounding) continue;
    if (fusion == &fusions::decoder_layer() && !options.joins_layers) continue;
    const bool disabled = std::any_of(options.disabled.begin(), options.disabled.end(),
                                      [&](const std::string& name) { return name == "all" || name == fusion->name; });
    std::optional<size_t> start = 0;
    while (start) start = fuse_some(graph, *fusion, *start, device, bounds, options, disabled, decisions, end);
  }
  if (forward_end != nullptr) *forward_end = end;
  return decisions;
}

}  // namespace eadem::pipeline
