// SPDX-License-Identifier: Apache-2.0
//
// Hooks: callbacks on the values that a step makes. They fire after the kernel that made the value, in program order.
// With no hook registered a step does nothing for them. While hooks are registered each kernel is waited for.
//
// A pattern is a name in which '*' stands for any characters, '?' for one and [abc] for one of those (fnmatch(3)). A
// value that a fusion keeps inside its kernel is made by no step, and has no hook: EngineOptions::disabled_fusions or
// op_by_op lets it be seen.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "eadem/pipeline/program.h"

namespace eadem::engine {

class HookRegistry {
 public:
  // `tensor` is on the host and valid during the call only; `layer` is -1 outside the layers. Must not register or
  // remove hooks.
  using Callback = std::function<void(const std::string& name, const TensorView& tensor, int layer)>;
  using HookId = int64_t;

  // What the engine's programs make: filled from each of them.
  struct Names {
    std::set<std::string> values;   // that some kernel writes
    std::set<std::string> weights;  // that a linear op of its own multiplies by
    std::set<std::string> fused;    // that no kernel writes, but would without fusions
    void add(const pipeline::Program& program);
  };
  void set_names(Names names) { names_ = std::move(names); }
  const Names& names() const { return names_; }

  // `pattern`: of value names ("model.layers.*.mlp.gated_activation.y"). Throws NotFound, with the nearest names, when
  // no value matches.
  HookId register_hook(const std::string& pattern, Callback callback);
  // `pattern`: of parameter names. Fires after each linear op that multiplies by such a parameter, with the parameter's
  // name and the op's input [rows, in]. A linear that a fusion took in is none. Throws NotFound likewise.
  HookId register_linear_input_hook(const std::string& pattern, Callback callback);
  // False when there is no such hook (any more).
  bool remove(HookId id);
  void clear() { hooks_.clear(), linear_input_hooks_.clear(); }
  bool has_hooks() const { return !hooks_.empty() || !linear_input_hooks_.empty(); }

  // The observer that fires the hooks for `program`; the registry and program must outlive it.
  pipeline::StepObserver observer(const pipeline::Program& program) const;

 private:
  struct Hook {
    HookId id;
    std::string pattern;
    Callback callback;
  };

  HookId add(std::vector<Hook>& hooks, const std::string& pattern, Callback callback,
             const std::set<std::string>& names, const char* kind);

  std::vector<Hook> hooks_, linear_input_hooks_;
  Names names_;
  HookId next_id_ = 1;
};

}  // namespace eadem::engine
