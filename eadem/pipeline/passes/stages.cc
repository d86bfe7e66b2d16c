// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/passes/stages.h"

#include <algorithm>
#include <map>
#include <set>

#include "eadem/ops/parallel/collectives.h"

namespace eadem::pipeline {

namespace {

constexpr int kEveryStage = -1;  // of what depends on inputs and constants alone

class StageCutter {
 public:
  StageCutter(Graph& graph, int stages, int stage) : graph_(graph), stages_(stages), stage_(stage) {}

  std::vector<SharedParameter> run(bool training, std::span<const std::string> frozen) {
    find_node_stages();
    find_readers();
    std::vector<SharedParameter> shared;
    if (training) shared = find_shared_parameters(frozen);
    refuse_crossing_states();
    std::vector<Node> nodes = std::move(graph_.nodes());
    graph_.nodes().clear();
    for (ValueId id : crossing(stage_ - 1)) receive(id);
    for (size_t n = 0; n < nodes.size(); ++n)
      if (node_stage_[n] == stage_ || (node_stage_[n] == kEveryStage && is_read_here(nodes[n])))
        graph_.nodes().push_back(std::move(nodes[n]));
    for (ValueId id : crossing(stage_))
      graph_.nodes().push_back(
          {.op = std::make_shared<ops::Send>(MeshAxis::pp, stage_ + 1), .inputs = {id}, .scope = "pipeline"});
    forget_other_stages();
    return shared;
  }

 private:
  int made_on(ValueId id) const { return made_on_[static_cast<size_t>(id)]; }

  void find_node_stages() {
    int layers = 0;
    for (const Node& node : graph_.nodes()) layers = std::max(layers, node.layer + 1);
    if (layers < stages_) throw InvalidArgument("{} layers for {} pipeline stages", layers, stages_);
    std::vector<int> stage_of_layer(static_cast<size_t>(layers));
    for (int s = 0; s < stages_; ++s) {
      const PartRange part = part_of(layers, stages_, s);
      std::fill_n(stage_of_layer.begin() + part.begin, part.size, s);
    }
    made_on_.assign(graph_.values().size(), kEveryStage);
    for (size_t v = 0; v < graph_.values().size(); ++v) {
      const Value::Kind kind = graph_.values()[v].kind;
      if (kind == Value::Kind::parameter || kind == Value::Kind::state) made_on_[v] = 0;  // no stage before the first
    }
    std::map<ValueId, size_t> unplaced;  // values of nodes outside of layers that read parameters and states alone
    const auto place = [&](size_t n, int stage) {
      node_stage_[n] = stage;
      for (ValueId id : graph_.nodes()[n].outputs)
        if (id != kNoValue) made_on_[static_cast<size_t>(id)] = stage;
    };
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      const Node& node = graph_.nodes()[n];
      node_stage_.push_back(kEveryStage);
      int stage = node.layer >= 0 ? stage_of_layer[static_cast<size_t>(node.layer)] : kEveryStage;
      for (ValueId id : node.inputs)
        if (id != kNoValue) stage = std::max(stage, made_on(id));
      place(n, stage);
      // They belong to the first stage that reads what they make, as the rounding of a head's weight does.
      for (ValueId id : node.inputs)
        if (const auto found = unplaced.find(id); found != unplaced.end()) {
          place(found->second, stage);
          std::erase_if(unplaced, [maker = found->second](const auto& entry) { return entry.second == maker; });
        }
      if (node.layer < 0 && reads_parameters_alone(node))
        for (ValueId id : node.outputs) unplaced[id] = n;
    }
  }

  bool reads_parameters_alone(const Node& node) const {
    return !node.inputs.empty() && std::all_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
      const Value::Kind kind = id == kNoValue ? Value::Kind::parameter : graph_.value(id).kind;
      return kind == Value::Kind::parameter || kind == Value::Kind::state;
    });
  }

  // The last stage that reads each value, and for values of every stage which stages do.
  void find_readers() {
    last_read_.assign(graph_.values().size(), kEveryStage);
    read_here_.assign(graph_.values().size(), false);
    for (size_t n = graph_.nodes().size(); n-- > 0;) {
      const Node& node = graph_.nodes()[n];
      const bool here = node_stage_[n] == stage_ || (node_stage_[n] == kEveryStage && is_read_here(node));
      for (ValueId id : node.inputs) {
        if (id == kNoValue) continue;
        last_read_[static_cast<size_t>(id)] = std::max(last_read_[static_cast<size_t>(id)], node_stage_[n]);
        if (here) read_here_[static_cast<size_t>(id)] = true;
      }
    }
  }

  bool is_read_here(const Node& node) const {
    return std::any_of(node.outputs.begin(), node.outputs.end(),
                       [&](ValueId id) { return id != kNoValue && read_here_[static_cast<size_t>(id)]; });
  }

  // The values that go from `stage` to the next.
  std::vector<ValueId> crossing(int stage) const {
    std::vector<ValueId> result;
    for (size_t v = 0; v < made_on_.size(); ++v)
      if (graph_.values()[v].kind == Value::Kind::activation && made_on_[v] != kEveryStage && made_on_[v] <= stage &&
          last_read_[v] > stage)
        result.push_back(static_cast<ValueId>(v));
    return result;
  }

  void receive(ValueId id) {
    const TensorType type = graph_.value(id).type;
    if (!(type.sharding == Sharding::replicated()))
      throw Unsupported("'{}' is {} and crosses pipeline stages; only whole values do", graph_.value(id).name,
                        to_string(type));
    graph_.nodes().push_back(
        {.op = std::make_shared<ops::Recv>(MeshAxis::pp, stage_ - 1, type), .outputs = {id}, .scope = "pipeline"});
  }

  std::vector<SharedParameter> find_shared_parameters(std::span<const std::string> frozen) const {
    std::map<ValueId, std::set<int>> readers;
    for (size_t n = 0; n < graph_.nodes().size(); ++n)
      for (ValueId id : graph_.nodes()[n].inputs)
        if (id != kNoValue && graph_.value(id).kind == Value::Kind::parameter) readers[id].insert(node_stage_[n]);
    std::vector<SharedParameter> shared;
    for (const auto& [id, stages] : readers) {
      const std::string& name = graph_.value(id).name;
      if (stages.size() == 1 || std::find(frozen.begin(), frozen.end(), name) != frozen.end()) continue;
      if (stages.size() > 2)
        throw Unsupported("{} pipeline stages read '{}'; tied weights of two stages can be trained, not of more",
                          stages.size(), name);
      shared.push_back({name, *stages.begin(), *stages.rbegin()});
    }
    return shared;
  }

  // A state stays where it is written: sending it would copy the cache of all tokens in every step.
  void refuse_crossing_states() const {
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      const Node& node = graph_.nodes()[n];
      const std::vector<ops::Port> ports = node.op->outputs();
      for (size_t i = 0; i < ports.size(); ++i) {
        const ValueId id = node.outputs[i];
        if (ports[i].role != ops::Port::Role::state || id == kNoValue) continue;
        if (const int reader = last_read_[static_cast<size_t>(id)]; reader > node_stage_[n])
          throw Unsupported("pipeline stage {} reads a state of stage {}, that of {}", reader, node_stage_[n],
                            describe(node));
      }
    }
  }

  void forget_other_stages() {
    std::vector<bool> known(graph_.values().size(), false);
    for (const Node& node : graph_.nodes())
      for (const std::vector<ValueId>& ids : {node.inputs, node.outputs})
        for (ValueId id : ids)
          if (id != kNoValue) known[static_cast<size_t>(id)] = true;
    std::erase_if(graph_.outputs(), [&](const GraphOutput& output) {
      const int made = made_on(output.value);
      return made != stage_ && !(made == kEveryStage && known[static_cast<size_t>(output.value)]);
    });
    for (size_t v = 0; v < known.size(); ++v)
      if (!known[v] && graph_.values()[v].kind != Value::Kind::input) graph_.forget(static_cast<ValueId>(v));
  }

  Graph& graph_;
  int stages_, stage_;
  std::vector<int> node_stage_, made_on_, last_read_;  // of nodes, values and values
  std::vector<bool> read_here_;
};

}  // namespace

std::vector<SharedParameter> keep_stage(Graph& graph, const Mesh& mesh, bool training,
                                        std::span<const std::string> frozen) {
  if (mesh.size(MeshAxis::pp) == 1) return {};
  return StageCutter(graph, mesh.size(MeshAxis::pp), mesh.rank(MeshAxis::pp)).run(training, frozen);
}

}  // namespace eadem::pipeline
