// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/hook_registry.h"

namespace eadem::engine {

void HookRegistry::register_hook(std::string name, Callback callback) {
  const bool is_prefix = name.ends_with('*');
  if (is_prefix) name.pop_back();
  hooks_.push_back({std::move(name), is_prefix, std::move(callback)});
}

pipeline::StepObserver HookRegistry::observer(const pipeline::Program& program) const {
  return [this, &program](const pipeline::Node& node, std::span<const TensorView> outputs) {
    Device& device = *program.environment().device;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (node.outputs[i] == pipeline::kNoValue) continue;
      const std::string& name = program.graph().value(node.outputs[i]).name;
      for (const Hook& hook : hooks_) {
        if (hook.is_prefix ? !name.starts_with(hook.name) : name != hook.name) continue;
        if (device.host_accessible()) {
          hook.callback(name, outputs[i], node.layer);
        } else {
          const Tensor host = copy_to_host(device, outputs[i]);
          hook.callback(name, host.view, node.layer);
        }
      }
    }
  };
}

}  // namespace eadem::engine
