// SPDX-License-Identifier: Apache-2.0
//
// Hooks: callbacks on the values that a step computes. They fire after the kernel that writes the value, in program
// order. Without hooks a step does no extra work. While hooks are registered, the engine waits for each kernel.
//
// A pattern is a name in which '*' stands for any characters, '?' for one and [abc] for one of those (fnmatch(3)). A
// value that a fusion keeps inside its kernel is never written, so no hook sees it. InferEngine::unfuse(),
// EngineOptions::disabled_fusions or op_by_op makes it visible.
//
// Several ranks: a hook is registered on the engine of rank 0 and sees the values of one rank, or those of every rank
// one after another: a part each, or the same whole. Its callback runs on rank 0, to which the others send what they
// made. They go through the step to its end even when a callback throws.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "eadem/engine/rank_channel.h"
#include "eadem/pipeline/program.h"

namespace eadem::engine {

class HookRegistry {
 public:
  // `tensor` is on the host and valid only during the call, and in f32 where a kernel has rounded it to 8 bits for
  // products; `layer` is -1 outside the layers. A callback must not register or remove hooks.
  using Callback = std::function<void(const std::string& name, const TensorView& tensor, int layer)>;
  using HookId = int64_t;

  // The names that hooks can match, collected from each of the engine's programs.
  struct Names {
    std::set<std::string> values;   // values that some kernel writes
    std::set<std::string> weights;  // weights that a linear op of its own multiplies by
    // Values that only a program without fusions would write, and the fusion that keeps each.
    std::map<std::string, std::string> fused;
    void add(const pipeline::Program& program);
  };
  void set_names(Names names, int num_ranks) {
    names_ = std::move(names);
    num_ranks_ = num_ranks;
  }
  const Names& names() const { return names_; }
  // The fusions that keep the values inside their kernels that match `pattern`, where no value that is written does.
  std::set<std::string> fusions_that_keep(const std::string& pattern) const;

  // Registers a hook on the values whose names match `pattern` ("model.layers.*.mlp.gated_activation.y"), as `rank`
  // makes them, or each rank in turn. Throws NotFound, with the nearest names, when no value matches or fusions keep
  // all that do, and InvalidArgument for a rank that does not exist.
  static constexpr int kEveryRank = -1;
  HookId register_hook(const std::string& pattern, Callback callback, int rank = kEveryRank);
  // Registers a hook on the inputs of linear ops whose parameter name matches `pattern`. It fires after each such op,
  // or after the op that rounds its input, with the parameter's name and the input [rows, in] before it is rounded. A
  // linear inside a fusion does not fire. Throws NotFound,
  // with the nearest names, when no such parameter matches.
  HookId register_linear_input_hook(const std::string& pattern, Callback callback, int rank = kEveryRank);
  // Returns false when there is no such hook, or not any more.
  bool remove(HookId id);
  void clear();
  bool has_hooks() const { return !hooks_.empty() || !linear_input_hooks_.empty(); }

  // Returns the observer that fires the hooks for `program`; the registry, the program and the channel must outlive it.
  // `channel`, null for one rank: that to the other ranks, whose observers fire the same hooks. What a callback of
  // theirs throws is then kept until rethrow().
  pipeline::StepObserver observer(const pipeline::Program& program, RankChannel* channel = nullptr);
  void rethrow();

  // Several ranks: whether the others have the hooks that rank 0 has now; and how they get them. There they have no
  // callbacks.
  bool is_told() const { return told_ == version_; }
  void put(RankChannel& channel);
  void take(RankChannel& channel);

 private:
  struct Hook {
    HookId id;
    std::string pattern;
    Callback callback;
    int rank;
  };

  HookId add(std::vector<Hook>& hooks, Hook hook, const std::set<std::string>& names, const char* kind);
  void call(const Hook& hook, const std::string& name, const TensorView& host, int layer, bool keeps_errors);
  void show_all(const Hook& hook, const std::string& name, const TensorView& host, int layer, int64_t value,
                RankChannel& channel);

  std::vector<Hook> hooks_, linear_input_hooks_;
  Names names_;
  int num_ranks_ = 1;
  HookId next_id_ = 1;
  uint64_t version_ = 0, told_ = 0;  // of the list of hooks
  std::exception_ptr thrown_;
};

}  // namespace eadem::engine
