// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/infer_engine.h"

#include <algorithm>
#include <numeric>

#include "eadem/engine/cache/memory_demand.h"

namespace eadem::engine {

using modules::CacheLayout;
using pipeline::Program;

namespace {

// Steps of at most this many tokens use the decode program, whose activations fit the processor's caches.
constexpr int64_t kDecodeTokens = 16;
modules::AutoHardwareConfig resolve(const modules::ModelSpec& spec, const Device& device,
                                    const EngineOptions& options) {
  return modules::AutoHardwareConfig::from_model_spec(spec, device, options.mode, options.hardware, "engine options");
}

CachePlanRequest request_of(const models::Model& model, const Device& device,
                            const modules::AutoHardwareConfig& hardware, const EngineOptions& options) {
  return {.config = options.cache,
          .bytes = state_bytes(model, device, hardware, options.mesh().size(MeshAxis::tp),
                               options.mesh().rank(MeshAxis::tp)),
          .context = model.info().max_positions,
          .default_context = model.info().default_context(),
          .block_size = hardware.of(modules::Role::attention).memory.kv_block_size.value,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .slots_per_sequence = options.draft_tokens > 0 ? 2 : 1};
}

EngineOptions with_defaults(EngineOptions options, const Device& device) {
  if (options.max_num_batched_tokens == 0) options.max_num_batched_tokens = default_step_tokens(device);
  return options;
}

// The most proposed tokens of a step. As many as decode steps have rows beside one, because more rows make a step wait
// for arithmetic.
int64_t most_drafts(const EngineOptions& options, const CachePlan& plan) {
  return std::min(plan.max_batch * options.draft_tokens, kDecodeTokens - 1);
}

// Pairs of the input `penalties` that a row of logits may have beside those of its penalties: biases and a mask.
int64_t pairs_beside_penalties(int64_t vocab) { return kMaxBiases + kernels::mask_pairs(vocab); }

// The upper bounds of a step of the decode or the prefill program.
SymbolValues program_bounds(const EngineOptions& options, const CachePlan& plan, int64_t vocab, bool decode) {
  const int64_t step_tokens = std::max(options.max_num_batched_tokens, plan.max_batch);
  const int64_t drafts = most_drafts(options, plan);
  const int64_t logit_rows = std::max(options.max_logit_rows, plan.max_batch + drafts);
  SymbolValues bounds;
  bounds[Symbol::tokens] = decode ? std::min(step_tokens, std::max(kDecodeTokens, plan.max_batch)) : step_tokens;
  bounds[Symbol::sequences] = plan.max_batch;
  bounds[Symbol::logit_rows] = std::min(logit_rows, bounds[Symbol::tokens]);
  bounds[Symbol::max_blocks] = plan.blocks_per_sequence();
  // Penalties need one pair for each token of the vocabulary, and no more pairs than the cache has tokens; the row of a
  // proposed token looks at the same tokens again. Biases and masks stand beside them.
  const int64_t of_sequence = std::min(plan.max_length, vocab);
  bounds[Symbol::penalties] = std::min(plan.max_batch * of_sequence, plan.spec.num_blocks * plan.spec.block_size) +
                              drafts * of_sequence + (plan.max_batch + drafts) * pairs_beside_penalties(vocab);
  return bounds;
}

std::vector<std::string> all_disabled(const EngineOptions& options, const modules::AutoHardwareConfig& hardware) {
  std::vector<std::string> result = options.disabled_fusions;
  for (std::string& name : hardware.disabled_fusions()) result.push_back(std::move(name));
  return result;
}

// `model` and `decisions`, which receives those of the factories unless it is null, must outlive what is made of the
// result.
ProgramSet::Options set_options(const models::Model& model, const std::shared_ptr<Device>& device,
                                const EngineOptions& options, const modules::AutoHardwareConfig& hardware,
                                const CachePlan& plan, std::vector<Decision>* decisions) {
  pipeline::Environment environment{.device = device, .mode = pipeline::Mode::inference};
  environment.disabled_fusions = all_disabled(options, hardware);
  environment.op_by_op = options.op_by_op;
  environment.mesh = options.mesh();
  if (options.num_ranks() > 1) environment.whole_outputs = {"hidden", "mtp_hidden", "logits"};
  const int64_t vocab = model.info().vocab;
  return {.make_graph =
              [&model, device, hardware, plan, decisions, mesh = options.mesh(),
               deterministic = options.deterministic_across_tp] {
                models::BuiltGraph built =
                    models::build_inference_graph(model, {.device = device.get(),
                                                          .hardware = &hardware,
                                                          .cache = plan.spec,
                                                          .num_ranks = mesh.size(MeshAxis::tp),
                                                          .rank = mesh.rank(MeshAxis::tp),
                                                          .expert_ranks = mesh.size(MeshAxis::ep),
                                                          .expert_rank = mesh.rank(MeshAxis::ep),
                                                          .longest_sequence = plan.max_length,
                                                          .deterministic_across_tp = deterministic});
                if (decisions != nullptr) *decisions = std::move(built.decisions);
                return std::move(built.graph);
              },
          .environment = std::move(environment),
          .prefill_bounds = program_bounds(options, plan, vocab, false),
          .decode_bounds = program_bounds(options, plan, vocab, true),
          .cache = plan.spec};
}

}  // namespace

int64_t default_step_tokens(const Device& device) { return device.host_accessible() ? 512 : 2048; }

StateBytes state_bytes(const models::Model& model, const Device& device, const modules::AutoHardwareConfig& hardware,
                       int num_ranks, int rank) {
  return StateBytes::of(models::states_of(model, device, hardware, num_ranks, rank));
}

CachePlanRequest cache_request(const models::Checkpoint& checkpoint, const Device& device,
                               const EngineOptions& options) {
  return request_of(*checkpoint.model, device, resolve(models::spec_of(checkpoint), device, options),
                    with_defaults(options, device));
}

int64_t kv_bytes_per_token(const models::Checkpoint& checkpoint, const Device& device, const EngineOptions& options) {
  return cache_request(checkpoint, device, options).bytes.all_per_token();
}

InferEngine::InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device,
                         const EngineOptions& options, const modules::ModelSpec& spec)
    : InferEngine(std::move(model), std::move(device), options, spec, false) {}

InferEngine::InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device,
                         const EngineOptions& options, const modules::ModelSpec& spec, bool maps_files)
    : model_(std::move(model)),
      device_(std::move(device)),
      options_(with_defaults(options, *device_)),
      maps_files_(maps_files && device_->host_accessible()),
      hardware_(resolve(spec, *device_, options)) {
  if (options.num_ranks() > 1) {
    if (!device_->host_accessible())
      throw Unsupported("{} ranks on {}; ranks compute on the CPU", options.num_ranks(), device_->description());
    channel_ = std::make_unique<RankChannel>(options.ranks, device_);
  }
  if (options.deterministic_across_tp && !device_->host_accessible())
    throw Unsupported("deterministic_across_tp on {}; ranks compute on the CPU", device_->description());
  require_count("max_num_batched_tokens", options_.max_num_batched_tokens, 1);
  require_count("max_logit_rows", options.max_logit_rows, 0);
  if (options.divide != MeshAxis::tp && options.divide != MeshAxis::ep)
    throw InvalidArgument("ranks divide {}; an engine's divide tp or ep", mesh_axis_name(options.divide));
  require_count("draft_tokens", options.draft_tokens, 0);
  parameters_ = std::make_shared<pipeline::ParameterStore>(device_, options_.mesh());
  if (options.deterministic_across_tp) parameters_->encode_before_cutting();
  if (leads()) {
    channel_->begin(RankCommand::start);
    channel_->put(options_.cache);
    channel_->put(options_.draft_tokens);
    channel_->tell();
  }
  together("making the engine", [&] {
    plan_ = plan_cache(request_of(*model_, *device_, hardware_, options_));
    compile();
  });
}

std::unique_ptr<InferEngine> InferEngine::from_checkpoint(const models::Checkpoint& checkpoint,
                                                          std::shared_ptr<Device> device, const EngineOptions& options,
                                                          const std::function<void(int64_t, int64_t)>& progress,
                                                          const Logger& log) {
  if (!options.pack_cache.empty() && !device->host_accessible())
    throw InvalidArgument("pack_cache is '{}'; {} does not run from mapped files", options.pack_cache,
                          device->description());
  std::unique_ptr<InferEngine> engine(
      new InferEngine(checkpoint.model, std::move(device), options, models::spec_of(checkpoint), true));
  engine->load_weights(checkpoint, progress, log);
  return engine;
}

void InferEngine::load_weights(const models::Checkpoint& checkpoint,
                               const std::function<void(int64_t, int64_t)>& progress, const Logger& log) {
  together("loading", [&] {
    models::load_weights(
        *parameters_, checkpoint, progress,
        {.in_place = true,
         .pack_cache = options_.pack_cache,
         .pack_later = options_.pack_after_first_step && options_.pack_cache.empty() && options_.num_ranks() == 1,
         .log = &log});
  });
}

void InferEngine::compile() {
  const models::ModelInfo& info = model_->info();
  const SymbolValues most = program_bounds(options_, plan_, info.vocab, false);
  const Mesh mesh = options_.mesh();
  const std::vector<modules::StateSpec> states =
      models::states_of(*model_, *device_, hardware_, mesh.size(MeshAxis::tp), mesh.rank(MeshAxis::tp));
  ProgramSet::Options set = set_options(*model_, device_, options_, hardware_, plan_, &factory_decisions_);
  set.bind_states = [this](Program& program) { bind_caches(program); };
  // Ranks share the machine's memory, and none of them has allocated anything yet.
  const int64_t free_bytes = device_->memory().free_bytes / options_.num_ranks();
  set.before_allocation = [&](std::span<Program* const> programs) { require_memory_for(programs, states, free_bytes); };
  programs_ = std::make_unique<ProgramSet>(std::move(set), parameters_);
  last_ = nullptr;
  for (const auto& compiled : programs_->programs()) compiled->program->require_complete();
  const ConfigOption<LatentForm>& form = hardware_.of(modules::Role::attention).compute.latent_form;
  if (form.value == LatentForm::decompressed && !prefill_program().graph().find("prompt_length"))
    throw InvalidArgument("latent_form is decompressed ({}); no layer of this model has latent attention over all rows",
                          form.set_by);
  collect_sequence_states(states);
  descriptor_ = std::make_unique<StepDescriptor>(device_, programs_->step_bytes(), cache_spec(), info.vocab);
  const int64_t most_rows = most[Symbol::logit_rows];
  sampled_ = device_->allocate(most_rows * static_cast<int64_t>(sizeof(int32_t)));
  programs_->bind(descriptor_->device_data(), sampled_.data());
  name_values();

  num_submitted_ = num_collected_ = 0;
  for (InFlight& step : steps_) {
    step.done = device_->make_event();
    step.host = device_->allocate_on_host(most_rows * HostResults::kBytesPerRow);
    step.unseen.reserve(static_cast<size_t>(max_batch_size()));
  }
  const auto reserve = [](auto& list, int64_t size) { list.reserve(static_cast<size_t>(size)); };
  reserve(sequences_, max_batch_size());
  reserve(output_.output_ids, most_rows);
  reserve(output_.logprobs, most_rows);
  contents_ = CacheContents(cache_spec().num_blocks, cache_spec().block_size);
  window_contents_.clear();
  for (const modules::WindowGroup& group : cache_spec().windows)
    window_contents_.emplace_back(group, cache_spec().num_blocks, cache_spec().block_size);
  identity_.resize(static_cast<size_t>(max_batch_size()));
  std::iota(identity_.begin(), identity_.end(), 0);
  rings_ = WindowRings(cache_spec(), max_batch_size(), plan_.blocks_per_sequence());
}

void InferEngine::require_memory_for(std::span<Program* const> programs, std::span<const modules::StateSpec> states,
                                     int64_t free_bytes) const {
  std::vector<std::string> existing;
  for (const auto& [name, cache] : caches_) existing.push_back(name);
  const MemoryDemand demand = demand_of(programs, *parameters_,
                                        {.states = states,
                                         .existing_states = existing,
                                         .cache = &cache_spec(),
                                         .maps_files = maps_files_,
                                         .maps_all = maps_files_ && !options_.pack_cache.empty()});
  require_memory(demand, request_of(*model_, *device_, hardware_, options_), plan_, free_bytes, options_.num_ranks());
}

// Collects the names that hooks can be registered on.
void InferEngine::name_values() {
  HookRegistry::Names names;
  for (const Program* program : {&prefill_program(), &decode_program()}) names.add(*program);
  hooks_.set_names(std::move(names), options_.num_ranks());
}

ProgramSet InferEngine::compile_for_explain(const models::Model& model, const std::shared_ptr<Device>& device,
                                            const EngineOptions& given, const modules::ModelSpec& spec) {
  const EngineOptions options = with_defaults(given, *device);
  const modules::AutoHardwareConfig hardware = resolve(spec, *device, options);
  const CachePlan plan = plan_cache(request_of(model, *device, hardware, options));
  return ProgramSet(set_options(model, device, options, hardware, plan, nullptr),
                    std::make_shared<pipeline::ParameterStore>(device));
}

void InferEngine::bind_caches(Program& program) {
  for (const auto& [name, id] : program.states()) {
    auto [found, inserted] = caches_.try_emplace(name);
    const TensorType& type = program.graph().value(id).type;
    if (inserted) {
      found->second = allocate_tensor(*device_, type, {});
      // In decode, threads divide the heads of one sequence, which are stored one after another. With several
      // sequences, neither their number nor their places in the cache are known in advance.
      const bool one_sequence = cache_spec().layout == CacheLayout::contiguous && max_batch_size() == 1;
      fill_new(*device_, found->second.view, one_sequence ? Placement::shares : Placement::interleaved);
    }
    program.bind_state(name, found->second.view);
  }
}

void InferEngine::collect_sequence_states(std::span<const modules::StateSpec> states) {
  std::vector<TensorView> views;
  for (const modules::StateSpec& state : states)
    if (state.kind == modules::StateSpec::Kind::per_sequence) views.push_back(caches_.at(state.name).view);
  sequence_states_ = SequenceStates(device_, cache_spec().num_slots > 0 ? max_batch_size() : 0,
                                    cache_spec().num_snapshots, std::move(views));
}

int64_t InferEngine::cache_bytes() const {
  int64_t total = 0;
  for (const auto& [name, id] : prefill_program().states())
    total += prefill_program().graph().value(id).type.size_bytes({});
  return total;
}

SchedulerLimits InferEngine::limits() const {
  return {.max_batch_size = max_batch_size(),
          .max_num_batched_tokens = std::max(options_.max_num_batched_tokens, max_batch_size()),
          .max_sequence_length = max_sequence_length(),
          .num_blocks = cache_spec().num_blocks,
          .block_size = cache_spec().block_size,
          .windows = cache_spec().windows,
          .num_slots = sequence_states_.num_slots(),
          .num_snapshots = cache_spec().num_snapshots,
          .vocab = model_->info().vocab,
          .model_context = model_->info().max_positions,
          .max_penalized_tokens = max_penalized_tokens(),
          .max_logit_rows = prefill_program().environment().bounds[Symbol::logit_rows],
          .max_draft_tokens = most_drafts(options_, plan_),
          .prefix_caching = reuses_prefixes(),
          .cache_salt = std::string(hardware_.of(modules::Role::attention).precision.kv_cache.value.name())};
}

int64_t InferEngine::max_penalized_tokens() const {
  return prefill_program().environment().bounds[Symbol::penalties] -
         (max_batch_size() + most_drafts(options_, plan_)) * pairs_beside_penalties(model_->info().vocab);
}

std::string InferEngine::why_no_return() const {
  if (sequence_states_.num_slots() == 0 || sequence_states_.has_second_copies()) return {};
  return fmt::format(
      "{} has states per sequence, which a step overwrites, and of which the engine has no second copy; its "
      "draft_tokens are 0",
      model_->info().architecture);
}

bool InferEngine::reuses_prefixes() const { return why_no_prefix_caching(options_.cache, cache_spec()).empty(); }

void InferEngine::load_param(const std::string& name, const TensorView& whole) {
  if (leads()) tell_param(name, whole);
  together("load_param", [&] {
    contents_.begin_epoch();
    parameters_->load(name, whole, "load_param");
  });
}

void InferEngine::load_random(uint64_t seed, double stddev, const std::function<void(int64_t, int64_t)>& progress) {
  if (leads()) {
    channel_->begin(RankCommand::load_random);
    channel_->put(seed);
    channel_->put(stddev);
    channel_->tell();
  }
  together("load_random", [&] {
    contents_.begin_epoch();
    models::load_random(*parameters_, seed, stddev, progress);
  });
}

InferEngine::StateDict InferEngine::state_dict() const {
  StateDict result;
  for (const std::string& name : parameters_->names()) result.emplace_back(name, parameters_->to_host(name));
  return result;
}

void InferEngine::require_cache() const {
  if (programs_ == nullptr)
    throw InvalidArgument("the engine has no cache since reset_cache failed; call it with a smaller one");
}

void InferEngine::reset_cache() {
  require_cache();
  if (leads()) {
    channel_->begin(RankCommand::reset_cache);
    channel_->tell();
  }
  num_submitted_ = num_collected_ = 0;
  contents_.clear();
  for (WindowContents& contents : window_contents_) contents.clear();
  sequence_states_.reset_all();
  for (const auto& [name, cache] : caches_) fill_zero(*device_, cache.view);
}

void InferEngine::unfuse(const std::string& pattern) {
  require_cache();
  require_collected();
  // Without one fusion, another may keep the value.
  for (;;) {
    const std::set<std::string> found = hooks_.fusions_that_keep(pattern);
    if (found.empty()) return;
    const std::vector<std::string> names(found.begin(), found.end());
    if (leads()) {
      channel_->begin(RankCommand::disable_fusions);
      channel_->put(std::ssize(names));
      for (const std::string& name : names) channel_->put_text(name);
      channel_->tell();
    }
    disable_fusions(names);
  }
}

void InferEngine::disable_fusions(const std::vector<std::string>& names) {
  const std::vector<std::string> before = options_.disabled_fusions;
  options_.disabled_fusions.insert(options_.disabled_fusions.end(), names.begin(), names.end());
  try {
    together("switching off fusions", [&] { compile(); });
  } catch (const TaskFailed&) {
    programs_.reset();  // another rank runs other programs
    throw;
  } catch (...) {
    options_.disabled_fusions = before;
    throw;
  }
}

void InferEngine::reset_cache(const CacheConfig& config) {
  // Every check that can refuse the new configuration runs before the old cache is freed.
  EngineOptions options = options_;
  options.cache = config;
  const CachePlan plan = plan_cache(request_of(*model_, *device_, hardware_, options));
  if (leads()) {
    channel_->begin(RankCommand::new_cache);
    channel_->put(config);
    channel_->tell();
  }
  options_.cache = config;
  last_ = nullptr;
  num_submitted_ = num_collected_ = 0;
  programs_.reset();
  caches_.clear();
  plan_ = plan;
  try {
    together("reset_cache", [&] { compile(); });
  } catch (...) {
    programs_.reset();  // another rank has no cache
    throw;
  }
}

Tensor InferEngine::logits() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no logits");
  return copy_to_host(*device_, last_->program->view(last_->logits).rows(0, last_rows_));
}

Tensor InferEngine::hidden_states() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no hidden states");
  return copy_to_host(*device_, last_->program->view(last_->hidden).rows(0, last_tokens_));
}

Tensor InferEngine::mtp_hidden() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no hidden states");
  return copy_to_host(*device_, last_->program->view(last_->mtp_hidden).rows(0, last_tokens_));
}

}  // namespace eadem::engine
