// SPDX-License-Identifier: Apache-2.0
//
// Program: a compiled graph for one device, mode and shape bucket. Every buffer, view and plan of a kernel was settled
// when it was compiled; a step binds the symbols that changed (how many tokens, sequences, …) and runs the plans in
// order. It allocates nothing, takes no lock and looks nothing up.
//
// One thread at a time may use a program.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>

#include "eadem/core/mesh/mesh.h"
#include "eadem/pipeline/memory_plan.h"
#include "eadem/pipeline/parameter_store.h"
#include "eadem/pipeline/passes/autograd.h"
#include "eadem/pipeline/passes/fusion.h"
#include "eadem/pipeline/passes/kernel_cover.h"
#include "eadem/pipeline/passes/stages.h"

namespace eadem::pipeline {

enum class Mode : uint8_t {
  inference,  // serving: fused, in place, state
  training,   // forward that saves, and backward
};

// Memory for the values of steps that programs share, because only one of them runs at a time. What one of them left
// there is gone when another runs. It has the size that the first program needed; a program that needs more has memory
// of its own.
struct Arena {
  Buffer memory;
};

// Everything the compilation of a graph depends on.
struct Environment {
  std::shared_ptr<Device> device;
  Mesh mesh;  // alone unless given; the store of the parameters has its rank along tp
  Mode mode = Mode::inference;
  SymbolValues bounds;  // the shape bucket
  std::vector<std::string> disabled_fusions;
  std::vector<std::string> whole_outputs;    // of several ranks: outputs that each gets whole (see sharding.h)
  std::vector<std::string> input_gradients;  // training: inputs whose gradients are wanted
  std::vector<std::string> frozen;           // training: parameters without gradients
  // Training: the caller sets "d.<out>" of every output before `run_forward`. A loss may then be made with its
  // gradients (passes/loss_gradients.h), and is there after `run_backward`.
  bool seeds_come_first = false;
  // Training: the backward pass makes the values of a layer again (passes/recompute.h). The same bits, less memory.
  bool recompute_layers = false;
  // Runs the ops one by one as the graph states them: no fusion, and every value keeps its own bytes. The same kernels,
  // the same bits.
  bool op_by_op = false;
  bool joins_layers = true;      // inference: layers may become one op (decoder_layer, decoder_layers)
  std::shared_ptr<Arena> arena;  // null: the program has memory of its own
  // Lets the device record a step whose symbols have their bounds, and replay it the next time (Device::record).
  bool record = false;
};

// Called after each kernel of a step, with the step's device idle. Views may lie in device memory. An input that the
// kernel wrote an output over is that output.
using StepObserver =
    std::function<void(const Node& node, std::span<const TensorView> inputs, std::span<const TensorView> outputs)>;

class Program {
 public:
  // A graph and what its compilation depends on.
  struct Source {
    Graph graph;
    Environment environment;
  };

  Program(Graph graph, Environment environment, std::shared_ptr<ParameterStore> parameters);
  // Compiles programs that read the same parameters, and chooses packings for all of them together
  // (packing_choice.h). A program that is compiled later takes the layouts that are there. `before_allocation` is
  // called once everything is chosen and planned, with the programs that can run, and may refuse them by an exception.
  using BeforeAllocation = std::function<void(std::span<Program* const>)>;
  static std::vector<std::unique_ptr<Program>> compile(std::vector<Source> sources,
                                                       const std::shared_ptr<ParameterStore>& parameters,
                                                       const BeforeAllocation& before_allocation = {});
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // --- Before the first step. States (caches, gradients, moments) are owned by the caller. The view must have the
  // state's type at the bounds.
  void bind_state(std::string_view name, const TensorView& view);
  std::vector<GraphOutput> states() const;  // every state and its value id

  // --- A step.
  // Handles for the step's inputs and outputs, to be looked up once.
  ValueId input(std::string_view name) const;   // throws NotFound
  ValueId output(std::string_view name) const;  // throws NotFound
  // Copies `size_bytes` from the host; no more than the input has at the bounds.
  void set_input(ValueId input, const void* host, int64_t size_bytes);
  // Makes steps read the input from memory of the device that the caller owns and fills before each, with room for the
  // input at the bounds. Kernels may write outputs over it.
  void bind_input(ValueId input, void* data);
  // Makes steps write the output to memory of the device that the caller owns, likewise. An output bound to the memory
  // of an input is that input of the next step.
  void bind_output(ValueId output, void* data);
  // The value as the last step left it, with that step's extents.
  TensorView view(ValueId value) const;
  void read(ValueId value, void* host) const;  // all of view(value) to the host
  // Likewise to memory of Device::allocate_on_host, without waiting (Device::copy_to_host_later).
  void read_later(ValueId value, void* host) const;

  // `cancel`: once it is set no more kernels are called and Cancelled is thrown; outputs and states are then what they
  // happen to be. Several ranks would part, and do not look at it.
  void run(const SymbolValues& symbols, const StepObserver* observer = nullptr,
           const std::atomic<bool>* cancel = nullptr);
  // Whether `run` with the bounds would replay what the device has recorded.
  bool is_recorded() const { return recording_ != nullptr; }
  // The halves of a training program.
  void run_forward(const SymbolValues& symbols, const StepObserver* observer = nullptr);
  void run_backward(const SymbolValues& symbols, const StepObserver* observer = nullptr);
  // Adds this pass's terms to the gradients of parameters that a later stage shares. run_backward leaves them out, so
  // that the later stage's terms can be added first. Call it after run_backward, with the same symbols.
  void run_deferred(const SymbolValues& symbols, const StepObserver* observer = nullptr);

  // Nodes [begin, end) alone, in order.
  void run_range(size_t begin, size_t end, const SymbolValues& symbols, const StepObserver* observer = nullptr) {
    run_steps(begin, end, symbols, observer);
  }

  // --- For `explain` and tests.
  const Graph& graph() const { return graph_; }
  const Environment& environment() const { return environment_; }
  const std::vector<KernelChoice>& choices() const { return choices_; }
  const std::vector<FusionDecision>& fusion_decisions() const { return fusion_decisions_; }
  const MemoryPlan& memory_plan() const { return plan_; }
  // Calls visit(node, port, parameter, packing) for each input of a node that is a parameter; packing null: as
  // declared.
  template <typename Visit>
  void each_parameter(Visit&& visit) const {
    for (size_t n = 0; n < graph_.nodes().size(); ++n) {
      const std::vector<ValueId>& inputs = graph_.nodes()[n].inputs;
      for (size_t port = 0; port < inputs.size(); ++port)
        if (inputs[port] != kNoValue && graph_.value(inputs[port]).kind == Value::Kind::parameter)
          visit(n, port, inputs[port], packing_of(n, port));
    }
  }
  // The plan of a node, null for a view, and the call that the last step made of it. Tools time plans alone with them.
  const kernels::Plan* plan(size_t node) const { return plans_[node].get(); }
  const kernels::KernelCall& call(size_t node) const { return steps_[node].call; }
  const std::vector<std::string>& trained_parameters() const { return differentiated_.parameters; }
  // Training: those that two stages of the mesh read, this one or others (passes/stages.h).
  const std::vector<SharedParameter>& shared_parameters() const { return shared_; }
  // Throws Unsupported when some op has no kernel here. A program may be compiled and explained without, but not run.
  void require_complete() const { pipeline::require_complete(graph_, choices_, *environment_.device); }
  bool is_complete() const;

 private:
  struct Step {
    std::vector<TensorView> inputs;  // rebound when the symbols change; parameters, when the store moves them
    std::vector<TensorView> outputs;
    kernels::KernelCall call;  // refers to both
  };
  // A port whose extents depend on symbols.
  struct SymbolicPort {
    TensorView* view;
    const TensorType* type;
  };
  // A port that reads a layout of a parameter.
  struct ParameterPort {
    TensorView* view;
    ValueId parameter;
    const Encoding* packing;
  };

  // The first part of compilation: a kernel for each node. `finish` does the rest.
  struct Covered {};
  Program(Covered, Graph graph, Environment environment, std::shared_ptr<ParameterStore> parameters);
  static void finish(std::span<Program* const> programs, const BeforeAllocation& before_allocation);
  const Encoding* packing_of(size_t node, size_t port) const;

  void cover_graph();
  void prepare_plans();
  void assign_storage();
  void build_steps();
  void list_parameters();
  void bind_parameters();
  TensorView bound_view(ValueId id) const;
  void bind_ports();
  void bind_symbols(const SymbolValues& symbols);
  void bind_all(const SymbolValues& symbols);
  void forget_addresses();
  void run_steps(size_t begin, size_t end, const SymbolValues& symbols, const StepObserver* observer = nullptr,
                 const std::atomic<bool>* cancel = nullptr);

  Graph graph_;
  Environment environment_;
  std::vector<Symbol> symbols_;  // of the graph
  std::shared_ptr<ParameterStore> parameters_;
  std::vector<FusionDecision> fusion_decisions_;
  std::vector<KernelChoice> choices_;
  Context context_;
  std::vector<kernels::PlanPtr> plans_;  // one per node; null: a view, nothing to run
  Differentiated differentiated_;
  std::vector<SharedParameter> shared_;
  MemoryPlan plan_;
  Buffer arena_;  // empty: that of the environment
  std::byte* arena_begin_ = nullptr;
  std::vector<Tensor> constants_;                               // device copies
  std::vector<TensorView> views_;                               // one per value, at the current symbols
  std::vector<void*> addresses_;                                // one per value: of its root
  std::vector<std::array<void*, kMaxPlanes - 1>> more_planes_;  // likewise, of states and activations that are encoded
  std::vector<Step> steps_;
  std::array<std::vector<SymbolicPort>, kMaxSymbols> symbolic_ports_;  // by symbol
  std::vector<ParameterPort> parameter_ports_;
  SymbolValues current_;
  bool bound_ = false;  // every port has its address
  bool ran_whole_ =
      false;  // since then, a step with the bounds: everything that the first call of a kernel does is done
  std::unique_ptr<Recording> recording_;  // of such a step
  uint64_t placement_ = 0;                // ParameterStore::placement() at the time of the views that the steps hold
};

}  // namespace eadem::pipeline
