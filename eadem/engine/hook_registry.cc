// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/hook_registry.h"

#include <fnmatch.h>

#include <algorithm>
#include <numeric>

namespace eadem::engine {

namespace {

constexpr size_t kNearestNames = 3;

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

bool matches_one_of(const std::string& pattern, const std::set<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return matches(pattern, name); });
}

// Levenshtein's distance.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string nearest(const std::string& pattern, const std::set<std::string>& names) {
  std::vector<std::pair<size_t, const std::string*>> order;
  for (const std::string& name : names) order.emplace_back(distance(pattern, name), &name);
  const size_t count = std::min(kNearestNames, order.size());
  std::partial_sort(
      order.begin(), order.begin() + static_cast<ptrdiff_t>(count), order.end(),
      [](const auto& a, const auto& b) { return a.first != b.first ? a.first < b.first : *a.second < *b.second; });
  std::string text;
  for (size_t i = 0; i < count; ++i) text += fmt::format("{}'{}'", i == 0 ? "" : ", ", *order[i].second);
  return text.empty() ? "none" : text;
}

// Returns the parameter that a linear op of its own multiplies by (ports: ops/linear.h), or null.
const pipeline::Value* linear_weight(const pipeline::Graph& graph, const pipeline::Node& node) {
  if (node.op->name() != "linear") return nullptr;
  const pipeline::Value& weight = graph.value(node.inputs[1]);
  return weight.kind == pipeline::Value::Kind::parameter ? &weight : nullptr;
}

// A host tensor as callbacks expect it: rows that were rounded for products are decoded.
Tensor plain(const TensorView& host) {
  if (host.encoding == nullptr) return Tensor(host, nullptr);
  const Tensor decoded = Tensor::on_host(host.dtype, host.shape);
  host.encoding->decode(decoded.view, host);
  return decoded;
}

// Calls visit(parameter) for the weights whose products' input is seen at `node`: where an op of its own rounds that
// input for several products, it is seen there, before it is rounded; else at the linear op.
template <typename Visit>
void for_each_weight(const pipeline::Graph& graph, const pipeline::Node& node, Visit&& visit) {
  const auto rounded_by = [&](const pipeline::Node& other, const pipeline::Node& linear) {
    return other.op->name() == "quantize" && other.outputs[0] == linear.inputs[0];
  };
  if (node.op->name() == "quantize") {
    for (const pipeline::Node& reader : graph.nodes())
      if (const pipeline::Value* weight = linear_weight(graph, reader); weight != nullptr && rounded_by(node, reader))
        visit(*weight);
    return;
  }
  const pipeline::Value* weight = linear_weight(graph, node);
  if (weight != nullptr && std::none_of(graph.nodes().begin(), graph.nodes().end(),
                                        [&](const pipeline::Node& other) { return rounded_by(other, node); }))
    visit(*weight);
}

}  // namespace

void HookRegistry::Names::add(const pipeline::Program& program) {
  const pipeline::Graph& graph = program.graph();
  for (const pipeline::Node& node : graph.nodes()) {
    for (const pipeline::ValueId id : node.outputs)
      if (id != pipeline::kNoValue) values.insert(graph.value(id).name);
    if (const pipeline::Value* weight = linear_weight(graph, node)) weights.insert(weight->name);
  }
  for (const pipeline::Value& value : graph.values())
    if (value.kind == pipeline::Value::Kind::activation) fused.insert(value.name);
  for (const std::string& name : values) fused.erase(name);
}

HookRegistry::HookId HookRegistry::add(std::vector<Hook>& hooks, const std::string& pattern, Callback callback,
                                       const std::set<std::string>& names, const char* kind) {
  if (!matches_one_of(pattern, names)) {
    if (&hooks == &hooks_ && matches_one_of(pattern, names_.fused))
      throw NotFound("hook on '{}': a fusion keeps that value inside its kernel; disabled_fusions lets it be seen",
                     pattern);
    throw NotFound("hook on '{}': no {} has that name; the nearest names are {}", pattern, kind,
                   nearest(pattern, names));
  }
  hooks.push_back({next_id_, pattern, std::move(callback)});
  return next_id_++;
}

HookRegistry::HookId HookRegistry::register_hook(const std::string& pattern, Callback callback) {
  return add(hooks_, pattern, std::move(callback), names_.values, "value");
}

HookRegistry::HookId HookRegistry::register_linear_input_hook(const std::string& pattern, Callback callback) {
  return add(linear_input_hooks_, pattern, std::move(callback), names_.weights, "weight of a linear op");
}

bool HookRegistry::remove(HookId id) {
  const auto has_id = [&](const Hook& hook) { return hook.id == id; };
  return std::erase_if(hooks_, has_id) + std::erase_if(linear_input_hooks_, has_id) > 0;
}

pipeline::StepObserver HookRegistry::observer(const pipeline::Program& program) const {
  return [this, &program](const pipeline::Node& node, std::span<const TensorView> inputs,
                          std::span<const TensorView> outputs) {
    Device& device = *program.environment().device;
    const auto fire = [&](const std::vector<Hook>& hooks, const std::string& name, const TensorView& view) {
      for (const Hook& hook : hooks) {
        if (!matches(hook.pattern, name)) continue;
        if (device.host_accessible()) {
          hook.callback(name, plain(view).view, node.layer);
        } else {
          const Tensor host = copy_to_host(device, view);
          hook.callback(name, host.view, node.layer);
        }
      }
    };
    if (!linear_input_hooks_.empty())
      for_each_weight(program.graph(), node,
                      [&](const pipeline::Value& weight) { fire(linear_input_hooks_, weight.name, inputs[0]); });
    for (size_t i = 0; i < outputs.size(); ++i)
      if (node.outputs[i] != pipeline::kNoValue) fire(hooks_, program.graph().value(node.outputs[i]).name, outputs[i]);
  };
}

}  // namespace eadem::engine
