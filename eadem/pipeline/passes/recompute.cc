// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/recompute.h"

#include <algorithm>
#include <iterator>
#include <map>

namespace eadem::pipeline {

namespace {

constexpr size_t kNone = static_cast<size_t>(-1);

class Recompute {
 public:
  Recompute(Graph& graph, const Differentiated& differentiated)
      : graph_(graph),
        forward_end_(differentiated.forward_end),
        backward_end_(graph.nodes().size() - differentiated.num_deferred),
        maker_(graph.values().size(), kNone),
        kept_(graph.values().size(), false) {}

  void run() {
    find_makers();
    find_kept();
    std::map<int, size_t> first_readers;  // of each layer, among the nodes of the backward pass
    for (size_t n = forward_end_; n < backward_end_; ++n)
      for (ValueId id : graph_.nodes()[n].inputs)
        if (is_made_again(id)) first_readers.try_emplace(graph_.nodes()[maker_of(id)].layer, n);
    for (const auto& [layer, reader] : first_readers) copy_layer(layer, reader);
    insert();
  }

 private:
  size_t maker_of(ValueId id) const { return id == kNoValue ? kNone : maker_[static_cast<size_t>(id)]; }
  bool is_made_again(ValueId id) const { return maker_of(id) != kNone && !kept_[static_cast<size_t>(id)]; }

  // Whether a forward node may run twice.
  bool may_run_again(const Node& node) const {
    const auto is_state = [&](ValueId id) { return id != kNoValue && graph_.value(id).kind == Value::Kind::state; };
    return node.layer >= 0 && !node.op->crosses() && std::none_of(node.inputs.begin(), node.inputs.end(), is_state) &&
           std::none_of(node.outputs.begin(), node.outputs.end(), is_state);
  }

  // Only what may be made again has one.
  void find_makers() {
    for (size_t n = 0; n < forward_end_; ++n)
      if (may_run_again(graph_.nodes()[n]))
        for (ValueId id : graph_.nodes()[n].outputs)
          if (id != kNoValue) maker_[static_cast<size_t>(id)] = n;
  }

  void find_kept() {
    const auto keep = [&](ValueId id) { kept_[static_cast<size_t>(id)] = true; };
    for (const GraphOutput& output : graph_.outputs()) keep(output.value);
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      if (n >= forward_end_ && n < backward_end_) continue;
      for (ValueId id : graph_.nodes()[n].inputs)
        if (maker_of(id) != kNone &&
            (n >= backward_end_ || graph_.nodes()[maker_of(id)].layer != graph_.nodes()[n].layer))
          keep(id);
    }
  }

  // Copies what the backward pass reads of a layer, and what that is made of, to stand before `reader`.
  void copy_layer(int layer, size_t reader) {
    std::vector<bool> wanted(graph_.values().size(), false);
    const auto want = [&](const Node& node) {
      for (ValueId id : node.inputs)
        if (is_made_again(id) && graph_.nodes()[maker_of(id)].layer == layer) wanted[static_cast<size_t>(id)] = true;
    };
    for (size_t n = reader; n < backward_end_; ++n) want(graph_.nodes()[n]);
    std::vector<size_t> again;  // the last first
    for (size_t n = forward_end_; n-- > 0;) {
      const Node& node = graph_.nodes()[n];
      const auto is_wanted = [&](ValueId id) { return is_made_again(id) && wanted[static_cast<size_t>(id)]; };
      if (node.layer != layer || std::none_of(node.outputs.begin(), node.outputs.end(), is_wanted)) continue;
      again.push_back(n);
      want(node);
    }
    for (auto n = again.rbegin(); n != again.rend(); ++n) {
      Node node = graph_.nodes()[*n];
      for (ValueId& id : node.inputs) id = copy_of(id);
      for (ValueId& id : node.outputs) {
        if (id == kNoValue) continue;
        const ValueId copy = graph_.new_activation(graph_.value(id).name + ".again");
        graph_.value(copy).type = graph_.value(id).type;
        if (is_made_again(id)) copies_[id] = copy;
        id = copy;
      }
      before_[reader].push_back(std::move(node));
    }
  }

  ValueId copy_of(ValueId id) const {
    const auto found = copies_.find(id);
    return found == copies_.end() ? id : found->second;
  }

  void insert() {
    std::vector<Node> nodes;
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      if (const auto found = before_.find(n); found != before_.end())
        std::move(found->second.begin(), found->second.end(), std::back_inserter(nodes));
      nodes.push_back(std::move(graph_.nodes()[n]));
      if (n >= forward_end_)
        for (ValueId& id : nodes.back().inputs) id = copy_of(id);
    }
    graph_.nodes() = std::move(nodes);
  }

  Graph& graph_;
  size_t forward_end_, backward_end_;
  std::vector<size_t> maker_;  // of each value, the node that may make it again
  std::vector<bool> kept_;
  std::map<ValueId, ValueId> copies_;
  std::map<size_t, std::vector<Node>> before_;  // nodes to insert before each
};

}  // namespace

void recompute_layers(Graph& graph, const Differentiated& differentiated) { Recompute(graph, differentiated).run(); }

}  // namespace eadem::pipeline
