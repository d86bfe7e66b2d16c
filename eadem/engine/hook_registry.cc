// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/hook_registry.h"

#include <fnmatch.h>

#include <algorithm>

#include "eadem/core/edit_distance.h"

namespace eadem::engine {

namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

bool matches_one_of(const std::string& pattern, const std::set<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return matches(pattern, name); });
}

std::string listed(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Returns the parameter that a linear op of its own multiplies by (ports: ops/linear.h), or kNoValue.
pipeline::ValueId linear_weight(const pipeline::Graph& graph, const pipeline::Node& node) {
  if (node.op->name() != "linear") return pipeline::kNoValue;
  const pipeline::ValueId weight = node.inputs[1];
  return graph.value(weight).kind == pipeline::Value::Kind::parameter ? weight : pipeline::kNoValue;
}

// A value as callbacks expect it: on the host, and in f32 if it was rounded for products.
Tensor plain_on_host(Device& device, const TensorView& value) {
  const Tensor host = device.host_accessible() ? Tensor(value, nullptr) : copy_to_host(device, value);
  if (value.encoding == nullptr) return host;
  const Tensor decoded = Tensor::on_host(DType::f32, value.shape);
  value.encoding->decode(decoded.view, host.view);
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
      if (const pipeline::ValueId weight = linear_weight(graph, reader);
          weight != pipeline::kNoValue && rounded_by(node, reader))
        visit(weight);
    return;
  }
  const pipeline::ValueId weight = linear_weight(graph, node);
  if (weight != pipeline::kNoValue &&
      std::none_of(graph.nodes().begin(), graph.nodes().end(),
                   [&](const pipeline::Node& other) { return rounded_by(other, node); }))
    visit(weight);
}

}  // namespace

void HookRegistry::Names::add(const pipeline::Program& program) {
  const pipeline::Graph& graph = program.graph();
  for (const pipeline::Node& node : graph.nodes()) {
    for (const pipeline::ValueId id : node.outputs)
      if (id != pipeline::kNoValue) values.insert(graph.value(id).name);
    if (const pipeline::ValueId weight = linear_weight(graph, node); weight != pipeline::kNoValue)
      weights.insert(graph.value(weight).name);
  }
  for (const pipeline::FusionDecision& decision : program.fusion_decisions())
    for (const std::string& name : decision.kept_inside) fused.try_emplace(name, decision.fusion);
  for (const std::string& name : values) fused.erase(name);
}

std::set<std::string> HookRegistry::fusions_that_keep(const std::string& pattern) const {
  std::set<std::string> fusions;
  if (matches_one_of(pattern, names_.values)) return fusions;
  for (const auto& [name, fusion] : names_.fused)
    if (matches(pattern, name)) fusions.insert(fusion);
  return fusions;
}

HookRegistry::HookId HookRegistry::add(std::vector<Hook>& hooks, Hook hook, const std::set<std::string>& names,
                                       const char* kind) {
  if (!matches_one_of(hook.pattern, names)) {
    if (const std::set<std::string> fusions = fusions_that_keep(hook.pattern); &hooks == &hooks_ && !fusions.empty())
      throw NotFound(
          "hook on '{}': a fusion keeps that value inside its kernel ({}), and can be switched off; the nearest values "
          "that are seen are {}",
          hook.pattern, listed(fusions), nearest_names(hook.pattern, names, true));
    throw NotFound("hook on '{}': no {} has that name; the nearest names are {}", hook.pattern, kind,
                   nearest_names(hook.pattern, names, true));
  }
  if (hook.rank < kEveryRank || hook.rank >= num_ranks_)
    throw InvalidArgument("hook on '{}' of rank {}; expected 0 to {}", hook.pattern, hook.rank, num_ranks_ - 1);
  hook.id = next_id_;
  hooks.push_back(std::move(hook));
  ++version_;
  return next_id_++;
}

HookRegistry::HookId HookRegistry::register_hook(const std::string& pattern, Callback callback, int rank) {
  return add(hooks_, {0, pattern, std::move(callback), rank}, names_.values, "value");
}

HookRegistry::HookId HookRegistry::register_linear_input_hook(const std::string& pattern, Callback callback, int rank) {
  return add(linear_input_hooks_, {0, pattern, std::move(callback), rank}, names_.weights, "weight of a linear op");
}

bool HookRegistry::remove(HookId id) {
  const auto has_id = [&](const Hook& hook) { return hook.id == id; };
  ++version_;
  return std::erase_if(hooks_, has_id) + std::erase_if(linear_input_hooks_, has_id) > 0;
}

void HookRegistry::clear() {
  hooks_.clear();
  linear_input_hooks_.clear();
  ++version_;
}

void HookRegistry::put(RankChannel& channel) {
  for (const std::vector<Hook>* hooks : {&hooks_, &linear_input_hooks_}) {
    channel.put(std::ssize(*hooks));
    for (const Hook& hook : *hooks) {
      channel.put_text(hook.pattern);
      channel.put(hook.rank);
    }
  }
  told_ = version_;
}

void HookRegistry::take(RankChannel& channel) {
  for (std::vector<Hook>* hooks : {&hooks_, &linear_input_hooks_}) {
    hooks->clear();
    for (auto count = channel.take<ptrdiff_t>(); count > 0; --count) {
      std::string pattern = channel.take_text();
      hooks->push_back({0, std::move(pattern), {}, channel.take<int>()});
    }
  }
}

void HookRegistry::call(const Hook& hook, const std::string& name, const TensorView& host, int layer,
                        bool keeps_errors) {
  if (!keeps_errors) return hook.callback(name, host, layer);
  if (thrown_) return;
  try {
    hook.callback(name, host, layer);
  } catch (...) {
    thrown_ = std::current_exception();
  }
}

// Fires one hook on `host`, which this rank made, and what the other ranks made of the same value.
void HookRegistry::show_all(const Hook& hook, const std::string& name, const TensorView& host, int layer, int64_t value,
                            RankChannel& channel) {
  const auto sees = [&](int rank) { return hook.rank == kEveryRank || hook.rank == rank; };
  if (channel.rank() > 0) {
    if (sees(channel.rank())) channel.show(host, value);
    return;
  }
  if (sees(0)) call(hook, name, host, layer, true);
  for (int rank = 1; rank < channel.size(); ++rank)
    if (sees(rank)) call(hook, name, channel.see(rank, value).view, layer, true);
}

pipeline::StepObserver HookRegistry::observer(const pipeline::Program& program, RankChannel* channel) {
  thrown_ = nullptr;
  return [this, &program, channel](const pipeline::Node& node, std::span<const TensorView> inputs,
                                   std::span<const TensorView> outputs) {
    Device& device = *program.environment().device;
    const auto fire = [&](const std::vector<Hook>& hooks, pipeline::ValueId value, const TensorView& view) {
      const std::string& name = program.graph().value(value).name;
      for (const Hook& hook : hooks) {
        if (!matches(hook.pattern, name)) continue;
        const Tensor host = plain_on_host(device, view);
        if (channel != nullptr)
          show_all(hook, name, host.view, node.layer, value, *channel);
        else
          call(hook, name, host.view, node.layer, false);
      }
    };
    if (!linear_input_hooks_.empty())
      for_each_weight(program.graph(), node,
                      [&](pipeline::ValueId weight) { fire(linear_input_hooks_, weight, inputs[0]); });
    for (size_t i = 0; i < outputs.size(); ++i)
      if (node.outputs[i] != pipeline::kNoValue) fire(hooks_, node.outputs[i], outputs[i]);
  };
}

void HookRegistry::rethrow() {
  if (const std::exception_ptr thrown = std::exchange(thrown_, nullptr)) std::rethrow_exception(thrown);
}

}  // namespace eadem::engine
