// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/hook_registry.h"

namespace eadem::engine {

HookRegistry::Hook::Hook(std::string hook_name, Callback hook_callback)
    : name(std::move(hook_name)), is_prefix(name.ends_with('*')), callback(std::move(hook_callback)) {
  if (is_prefix) name.pop_back();
}

void HookRegistry::register_hook(std::string name, Callback callback) {
  hooks_.emplace_back(std::move(name), std::move(callback));
}

void HookRegistry::register_linear_input_hook(std::string weight, Callback callback) {
  linear_input_hooks_.emplace_back(std::move(weight), std::move(callback));
}

pipeline::StepObserver HookRegistry::observer(const pipeline::Program& program) const {
  return [this, &program](const pipeline::Node& node, std::span<const TensorView> inputs,
                          std::span<const TensorView> outputs) {
    Device& device = *program.environment().device;
    const auto fire = [&](const std::vector<Hook>& hooks, const std::string& name, const TensorView& view) {
      for (const Hook& hook : hooks) {
        if (!hook.matches(name)) continue;
        if (device.host_accessible()) {
          hook.callback(name, view, node.layer);
        } else {
          const Tensor host = copy_to_host(device, view);
          hook.callback(name, host.view, node.layer);
        }
      }
    };
    if (node.op->name() == "linear") {  // ports: ops/linear.h
      const pipeline::Value& weight = program.graph().value(node.inputs[1]);
      if (weight.kind == pipeline::Value::Kind::parameter) fire(linear_input_hooks_, weight.name, inputs[0]);
    }
    for (size_t i = 0; i < outputs.size(); ++i)
      if (node.outputs[i] != pipeline::kNoValue) fire(hooks_, program.graph().value(node.outputs[i]).name, outputs[i]);
  };
}

}  // namespace eadem::engine
