// SPDX-License-Identifier: Apache-2.0
//
// Hooks: callbacks on the values that a step computes. They fire after the kernel that writes the value, in program
// order. Without hooks a step does no extra work. While hooks are registered, the engine waits for each kernel.
//
// A pattern is a name in which '*' stands for any characters, '?' for one and [abc] for one of those (fnmatch(3)). A
// value that a fusion keeps inside its kernel is never written, so no hook sees it. EngineOptions::disabled_fusions or
// op_by_op makes it visible.
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
  // `tensor` is on the host and valid only during the call; `layer` is -1 outside the layers. A callback must not
  // register or remove hooks.
  using Callback = std::function<void(const std::string& name, const TensorView& tensor, int layer)>;
  using HookId = int64_t;

  // The names that hooks can match, collected from each of the engine's programs.
  struct Names {
    std::set<std::string> values;   // values that some kernel writes
    std::set<std::string> weights;  // weights that a linear op of its own multiplies by
    std::set<std::string> fused;    // values that only a program without fusions would write
    void add(const pipeline::Program& program);
  };
  void set_names(Names names) { names_ = std::move(names); }
  const Names& names() const { return names_; }

  // Registers a hook on the values whose names match `pattern` ("model.layers.*.mlp.gated_activation.y"). Throws
  // NotFound, with the nearest names, when no value matches.
  HookId register_hook(const std::string& pattern, Callback callback);
  // Registers a hook on the inputs of linear ops whose parameter name matches `pattern`. It fires after each such op,
  // or after the op that rounds its input, with the parameter's name and the input [rows, in] before it is rounded. A
  // linear inside a fusion does not fire. Throws NotFound,
  // with the nearest names, when no such parameter matches.
  HookId register_linear_input_hook(const std::string& pattern, Callback callback);
  // Returns false when there is no such hook, or not any more.
  bool remove(HookId id);
  void clear() { hooks_.clear(), linear_input_hooks_.clear(); }
  bool has_hooks() const { return !hooks_.empty() || !linear_input_hooks_.empty(); }

  // Returns the observer that fires the hooks for `program`; the registry and the program must outlive it.
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
