// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/program.h"

#include "eadem/pipeline/passes/join_layers.h"
#include "eadem/pipeline/passes/loss_gradients.h"
#include "eadem/pipeline/passes/packing_choice.h"
#include "eadem/pipeline/passes/precision.h"
#include "eadem/pipeline/passes/recompute.h"
#include "eadem/pipeline/passes/sharding.h"

namespace eadem::pipeline {

Program::Program(Graph graph, Environment environment, std::shared_ptr<ParameterStore> parameters)
    : Program(Covered(), std::move(graph), std::move(environment), std::move(parameters)) {
  Program* alone[] = {this};
  finish(alone, {});
}

std::vector<std::unique_ptr<Program>> Program::compile(std::vector<Source> sources,
                                                       const std::shared_ptr<ParameterStore>& parameters,
                                                       const BeforeAllocation& before_allocation) {
  std::vector<std::unique_ptr<Program>> programs;
  std::vector<Program*> pointers;
  for (Source& source : sources) {
    programs.emplace_back(new Program(Covered(), std::move(source.graph), std::move(source.environment), parameters));
    pointers.push_back(programs.back().get());
  }
  finish(pointers, before_allocation);
  return programs;
}

Program::Program(Covered, Graph graph, Environment environment, std::shared_ptr<ParameterStore> parameters)
    : graph_(std::move(graph)),
      environment_(std::move(environment)),
      parameters_(std::move(parameters)),
      context_{*environment_.device, environment_.mesh} {
  cover_graph();
}

void Program::finish(std::span<Program* const> programs, const BeforeAllocation& before_allocation) {
  std::vector<PackingReader> readers;
  for (Program* program : programs) {
    const Environment& environment = program->environment_;
    if (environment.mode == Mode::inference)
      readers.push_back({&program->graph_, environment.device.get(), environment.bounds, &program->choices_});
  }
  agree_on_packings(readers, *programs.front()->parameters_);
  std::vector<Program*> complete;  // others can be explained, not run
  for (Program* program : programs)
    if (program->is_complete()) complete.push_back(program);
  for (Program* program : complete) program->prepare_plans();
  if (before_allocation) before_allocation(complete);
  for (Program* program : complete) {
    program->assign_storage();
    program->build_steps();
  }
}

const Encoding* Program::packing_of(size_t node, size_t port) const {
  const KernelChoice& choice = choices_[node];
  if (choice.kernel == nullptr || choice.kernel->packing == nullptr) return nullptr;
  const Node& own = graph_.nodes()[node];
  return choice.kernel->packing(choice.request(own, own.pass, *environment_.device, environment_.bounds),
                                static_cast<int>(port));
}

void Program::cover_graph() {
  const Device& device = *environment_.device;
  const bool training = environment_.mode == Mode::training;
  shard(graph_, environment_.mesh, environment_.whole_outputs);
  symbols_ = graph_.symbols();
  shared_ = keep_stage(graph_, environment_.mesh, training, environment_.frozen);
  insert_casts(graph_);
  FusionOptions fusion_options{training, environment_.disabled_fusions};
  fusion_options.joins_layers = environment_.joins_layers;
  if (environment_.op_by_op) fusion_options.disabled.emplace_back("all");
  fusion_decisions_ = fuse(graph_, device, environment_.bounds, fusion_options);
  if (!training && !environment_.op_by_op && environment_.joins_layers)
    for (FusionDecision& decision : join_layers(graph_, device, environment_.bounds, environment_.disabled_fusions))
      fusion_decisions_.push_back(std::move(decision));
  if (training) {
    std::vector<std::string> deferred;
    for (const SharedParameter& shared : shared_)
      if (shared.first == environment_.mesh.rank(MeshAxis::pp)) deferred.push_back(shared.name);
    differentiated_ =
        differentiate(graph_, environment_.input_gradients, environment_.mesh, environment_.frozen, deferred);
  } else {
    differentiated_.forward_end = graph_.nodes().size();
  }
  if (training && environment_.seeds_come_first && !environment_.op_by_op)
    join_losses(graph_, device, environment_.bounds, differentiated_.forward_end);
  insert_quantize(graph_, device, environment_.bounds, training, differentiated_.forward_end);
  fusion_options.after_rounding = true;
  for (FusionDecision& decision :
       fuse(graph_, device, environment_.bounds, fusion_options, &differentiated_.forward_end))
    fusion_decisions_.push_back(std::move(decision));
  if (training && environment_.recompute_layers) recompute_layers(graph_, differentiated_);
  choices_ = cover(graph_, device, environment_.bounds);
}

void Program::prepare_plans() {
  std::vector<int64_t> scratch(graph_.nodes().size(), 0);
  plans_.resize(graph_.nodes().size());
  for (size_t n = 0; n < choices_.size(); ++n) {
    const KernelChoice& choice = choices_[n];
    if (choice.kernel == nullptr) continue;
    const Node& node = graph_.nodes()[n];
    plans_[n] =
        choice.kernel->prepare(choice.request(node, node.pass, *environment_.device, environment_.bounds), context_);
    scratch[n] = plans_[n]->scratch_bytes();
  }
  plan_ = plan_memory(graph_, environment_.bounds, scratch, {.keep_everything = environment_.op_by_op});
}

bool Program::is_complete() const {
  for (size_t n = 0; n < choices_.size(); ++n)
    if (choices_[n].kernel == nullptr && !graph_.nodes()[n].op->is_view()) return false;
  return true;
}

void Program::assign_storage() {
  Device& device = *environment_.device;
  Arena* const shared = environment_.arena.get();
  if (shared != nullptr && shared->memory.data() == nullptr) shared->memory = device.allocate(plan_.arena_bytes);
  const bool fits = shared != nullptr && plan_.arena_bytes <= shared->memory.size_bytes();
  if (!fits) arena_ = device.allocate(plan_.arena_bytes);
  arena_begin_ = static_cast<std::byte*>(fits ? shared->memory.data() : arena_.data());
  addresses_.assign(graph_.values().size(), nullptr);
  more_planes_.assign(graph_.values().size(), {});
  for (size_t v = 0; v < graph_.values().size(); ++v) {
    const Value& value = graph_.values()[v];
    if (plan_.offset[v] >= 0) {
      addresses_[v] = arena_begin_ + plan_.offset[v];
      // The planes of an encoded activation lie where they do at the bounds, for any extents.
      if (value.type.encoding != nullptr)
        more_planes_[v] =
            view_of_planes(addresses_[v], *value.type.encoding, value.type.dtype, value.type.bind(environment_.bounds))
                .more_planes;
      if (value.kind == Value::Kind::input) device.fill_zero(addresses_[v], value.type.size_bytes(environment_.bounds));
    } else if (value.kind == Value::Kind::constant) {
      constants_.push_back(copy_to_device(environment_.device, value.constant.view));
      addresses_[v] = constants_.back().view.data;
    } else if (value.kind == Value::Kind::parameter && value.columns) {
      parameters_->declare_columns(value.name, value.type, value.columns->parameter, value.columns->begin,
                                   value.columns->of);
    } else if (value.kind == Value::Kind::parameter) {
      parameters_->declare(value.name, value.type);
    }
  }
}

void Program::build_steps() {
  steps_.resize(graph_.nodes().size());  // later moves would leave the ports behind
  for (size_t n = 0; n < graph_.nodes().size(); ++n) {
    const Node& node = graph_.nodes()[n];
    Step& step = steps_[n];
    step.inputs.resize(node.inputs.size());
    step.outputs.resize(node.outputs.size());
    step.call = {.inputs = step.inputs, .outputs = step.outputs, .scratch = {}, .context = &context_};
    if (const int64_t offset = plan_.scratch_offset[n]; offset >= 0)
      step.call.scratch = TensorView(arena_begin_ + offset, DType::u8, Shape{plan_.arena_bytes - offset});
    const auto list_ports = [&](const std::vector<ValueId>& ids, std::vector<TensorView>& views) {
      for (size_t port = 0; port < ids.size(); ++port) {
        if (ids[port] == kNoValue || graph_.value(ids[port]).kind == Value::Kind::parameter) continue;
        const TensorType& type = graph_.value(ids[port]).type;
        for (const Dim& dim : type.dims())
          if (!dim.is_fixed()) symbolic_ports_[dim.symbol.index()].push_back({&views[port], &type});
      }
    };
    list_ports(node.inputs, step.inputs);
    list_ports(node.outputs, step.outputs);
  }
  list_parameters();
  bind_parameters();
}

void Program::list_parameters() {
  each_parameter([this](size_t node, size_t port, ValueId id, const Encoding* packing) {
    parameter_ports_.push_back({&steps_[node].inputs[port], id, packing});
    if (const kernels::Kernel* kernel = choices_[node].kernel; kernel == nullptr || !kernel->reads_stored) {
      parameters_->layout(graph_.value(id).name, packing);
      parameters_->require_packed(graph_.value(id).name, packing);
    }
  });
}

void Program::bind_parameters() {
  for (const ParameterPort& port : parameter_ports_)
    *port.view = parameters_->layout(graph_.value(port.parameter).name, port.packing);
  placement_ = parameters_->placement();
}

void Program::bind_state(std::string_view name, const TensorView& view) {
  const std::optional<ValueId> id = graph_.find(name);
  if (!id || graph_.value(*id).kind != Value::Kind::state) throw NotFound("the program has no state '{}'", name);
  const TensorType& type = graph_.value(*id).type;
  if (view.dtype != type.dtype || view.encoding != type.encoding || !(view.shape == type.bind(environment_.bounds)))
    throw InvalidArgument("state '{}' is {}; the program was compiled for {}", name, to_string(view), to_string(type));
  addresses_[static_cast<size_t>(*id)] = view.data;
  more_planes_[static_cast<size_t>(*id)] = view.more_planes;
  forget_addresses();
}

std::vector<GraphOutput> Program::states() const {
  std::vector<GraphOutput> result;
  for (size_t v = 0; v < graph_.values().size(); ++v)
    if (graph_.values()[v].kind == Value::Kind::state)
      result.push_back({graph_.values()[v].name, static_cast<ValueId>(v)});
  return result;
}

ValueId Program::input(std::string_view name) const {
  const std::optional<ValueId> id = graph_.find(name);
  if (!id || graph_.value(*id).kind != Value::Kind::input) throw NotFound("the program has no input '{}'", name);
  return *id;
}

ValueId Program::output(std::string_view name) const {
  for (const GraphOutput& output : graph_.outputs())
    if (output.name == name) return output.value;
  throw NotFound("the program has no output '{}'", name);
}

void Program::set_input(ValueId input, const void* host, int64_t size_bytes) {
  const Value& value = graph_.value(input);
  EADEM_CHECK(value.kind == Value::Kind::input && size_bytes <= value.type.size_bytes(environment_.bounds),
              "'{}': {} bytes into {}", value.name, size_bytes, to_string(value.type));
  environment_.device->copy_from_host(addresses_[static_cast<size_t>(input)], host, size_bytes);
}

void Program::bind_input(ValueId input, void* data) {
  const Value& value = graph_.value(input);
  EADEM_CHECK(value.kind == Value::Kind::input, "'{}' is no input", value.name);
  addresses_[static_cast<size_t>(input)] = data;
  forget_addresses();
}

void Program::bind_output(ValueId output, void* data) {
  const size_t root = static_cast<size_t>(plan_.root[static_cast<size_t>(output)]);
  EADEM_CHECK(plan_.offset[root] >= 0 && graph_.values()[root].kind != Value::Kind::input, "'{}' is kept elsewhere",
              graph_.value(output).name);
  addresses_[root] = data;
  forget_addresses();
}

// The ports must be bound again, and what was recorded with them is of no use.
void Program::forget_addresses() {
  bound_ = ran_whole_ = false;
  recording_.reset();
}

TensorView Program::view(ValueId value) const { return bound_view(value); }

void Program::read(ValueId value, void* host) const {
  const TensorView source = bound_view(value);
  environment_.device->copy_to_host(host, source.data, source.size_bytes());
}

void Program::read_later(ValueId value, void* host) const {
  const TensorView source = bound_view(value);
  environment_.device->copy_to_host_later(host, source.data, source.size_bytes());
}

TensorView Program::bound_view(ValueId id) const {
  const Value& value = graph_.value(id);
  const auto root = static_cast<size_t>(plan_.root[static_cast<size_t>(id)]);
  void* data = addresses_[root];
  EADEM_CHECK(data != nullptr || value.kind == Value::Kind::parameter, "'{}' has no memory: was its state bound?",
              value.name);
  TensorView view(data, value.type.dtype, value.type.bind(current_));
  const Value::Kind kind = graph_.value(static_cast<ValueId>(root)).kind;
  if (kind == Value::Kind::state || kind == Value::Kind::activation) {
    view.encoding = value.type.encoding;
    view.more_planes = more_planes_[root];
  }
  return view;
}

// Binds every port, after states or the first symbols came.
void Program::bind_ports() {
  const auto bind = [&](const std::vector<ValueId>& ids, std::vector<TensorView>& views) {
    for (size_t port = 0; port < ids.size(); ++port)
      if (ids[port] != kNoValue && graph_.value(ids[port]).kind != Value::Kind::parameter)
        views[port] = bound_view(ids[port]);
  };
  for (size_t n = 0; n < steps_.size(); ++n) {
    bind(graph_.nodes()[n].inputs, steps_[n].inputs);
    bind(graph_.nodes()[n].outputs, steps_[n].outputs);
  }
  bound_ = true;
}

void Program::bind_symbols(const SymbolValues& symbols) {
  if (bound_ && symbols == current_) return;
  const SymbolValues before = current_;
  for (Symbol symbol : symbols_)
    EADEM_CHECK(symbols[symbol] >= 0 && symbols[symbol] <= environment_.bounds[symbol],
                "{} = {}, compiled for at most {}", symbol.name(), symbols[symbol], environment_.bounds[symbol]);
  current_ = symbols;
  if (!bound_) return bind_ports();
  // Addresses stay; the extents change of what depends on a changed symbol.
  for (Symbol symbol : symbols_)
    if (before[symbol] != symbols[symbol])
      for (const SymbolicPort& port : symbolic_ports_[symbol.index()]) port.view->shape = port.type->bind(symbols);
}

void Program::bind_all(const SymbolValues& symbols) {
  bind_symbols(symbols);
  if (placement_ == parameters_->placement()) return;
  bind_parameters();
  recording_.reset();
}

void Program::run_steps(size_t begin, size_t end, const SymbolValues& symbols, const StepObserver* observer,
                        const std::atomic<bool>* cancel) {
  bind_all(symbols);
  if (environment_.mesh.num_ranks() > 1) cancel = nullptr;
  for (size_t n = begin; n < end; ++n) {
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("interrupted");
    const Step& step = steps_[n];
    if (plans_[n] != nullptr) plans_[n]->run(step.call);
    if (observer != nullptr) [[unlikely]] {
      environment_.device->synchronize();
      (*observer)(graph_.nodes()[n], step.inputs, step.outputs);
    }
  }
}

void Program::run(const SymbolValues& symbols, const StepObserver* observer, const std::atomic<bool>* cancel) {
  if (!environment_.record || observer != nullptr || symbols != environment_.bounds)
    return run_steps(0, steps_.size(), symbols, observer, cancel);
  bind_all(symbols);
  if (!ran_whole_) {
    run_steps(0, steps_.size(), symbols, observer, cancel);
    ran_whole_ = true;
    return;
  }
  if (recording_ == nullptr) recording_ = environment_.device->record([&] { run_steps(0, steps_.size(), symbols); });
  environment_.device->replay(*recording_);
}

void Program::run_forward(const SymbolValues& symbols, const StepObserver* observer) {
  run_steps(0, differentiated_.forward_end, symbols, observer);
}

void Program::run_backward(const SymbolValues& symbols, const StepObserver* observer) {
  run_steps(differentiated_.forward_end, steps_.size() - differentiated_.num_deferred, symbols, observer);
}

void Program::run_deferred(const SymbolValues& symbols, const StepObserver* observer) {
  run_steps(steps_.size() - differentiated_.num_deferred, steps_.size(), symbols, observer);
}

}  // namespace eadem::pipeline
