// SPDX-License-Identifier: Apache-2.0
//
// Hooks: callbacks on the values that a step makes. They fire after the kernel that made the value, in program order.
// With no hook registered a step does nothing for them. While hooks are registered each kernel is waited for.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eadem/pipeline/program.h"

namespace eadem::engine {

class HookRegistry {
 public:
  // `tensor` is on the host and valid during the call only; `layer` is -1 outside the layers.
  using Callback = std::function<void(const std::string& name, const TensorView& tensor, int layer)>;

  // `name`: a value's name ("model.layers.0.mlp.gated_activation.y"), or a prefix of names followed by '*'.
  void register_hook(std::string name, Callback callback);
  // `weight`: a parameter's name, or a prefix followed by '*'. Fires after each linear op that multiplies by such a
  // parameter, with the parameter's name and the op's input [rows, in]. A linear that a fusion took in is none.
  void register_linear_input_hook(std::string weight, Callback callback);
  void clear() { hooks_.clear(), linear_input_hooks_.clear(); }
  bool has_hooks() const { return !hooks_.empty() || !linear_input_hooks_.empty(); }

  // The observer that fires the hooks for `program`; the registry and program must outlive it.
  pipeline::StepObserver observer(const pipeline::Program& program) const;

 private:
  struct Hook {
    Hook(std::string name, Callback callback);
    bool matches(const std::string& other) const { return is_prefix ? other.starts_with(name) : other == name; }

    std::string name;
    bool is_prefix;
    Callback callback;
  };
  std::vector<Hook> hooks_, linear_input_hooks_;
};

}  // namespace eadem::engine
