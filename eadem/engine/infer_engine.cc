// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/infer_engine.h"

#include <algorithm>
#include <numeric>

namespace eadem::engine {

using modules::CacheLayout;
using modules::CacheSpec;
using pipeline::Program;

namespace {

// Steps of at most this many tokens use the decode program, whose activations fit the processor's caches.
constexpr int64_t kDecodeTokens = 16;
// The largest value of anything that counts tokens or sequences: products of two such numbers and of a model's sizes,
// which its config bounds, then fit 64 bits.
constexpr int64_t kMaxCount = int64_t{1} << 24;

void require_count(const char* name, int64_t value, int64_t min) {
  if (value < min || value > kMaxCount)
    throw InvalidArgument("{} is {}; expected {} to {}", name, value, min, kMaxCount);
}

// `length` is a max_cache_len, where 0 stands for the model's context.
void require_context(int64_t length, const models::ModelInfo& info) {
  if (length < 0) throw InvalidArgument("max_cache_len is {}; expected at least 1", length);
  if (length > info.max_positions)
    throw InvalidArgument("max_cache_len is {}; the model's context is {} tokens", length, info.max_positions);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

modules::AutoHardwareConfig resolve(const modules::ModelSpec& spec, const Device& device,
                                    const EngineOptions& options) {
  return modules::AutoHardwareConfig::from_model_spec(spec, device, options.mode, options.hardware, "engine options");
}

struct Geometry {
  CacheSpec spec;
  int64_t max_batch;
  int64_t max_length;
};

Geometry cache_geometry(const models::ModelInfo& info, const modules::AutoHardwareConfig& hardware,
                        const CacheConfig& config) {
  if (const auto* fixed = std::get_if<StaticKVCacheConfig>(&config)) {
    require_count("max_batch_size", fixed->max_batch_size, 1);
    require_context(fixed->max_cache_len, info);
    const int64_t length = fixed->max_cache_len == 0 ? info.max_positions : fixed->max_cache_len;
    return {{CacheLayout::contiguous, fixed->max_batch_size, length}, fixed->max_batch_size, length};
  }
  PagedKVCacheConfig paged = std::get<PagedKVCacheConfig>(config);
  if (paged.block_size == 0) paged.block_size = hardware.of(modules::Role::attention).memory.kv_block_size.value;
  require_count("block_size", paged.block_size, 1);
  require_count("max_batch_size", paged.max_batch_size, 1);
  require_context(paged.max_cache_len, info);
  int64_t num_blocks = paged.max_batch_size * ceil_div(paged.max_cache_len, paged.block_size);
  if (paged.max_kv_memory_bytes != 0 || paged.max_cache_len == 0) {
    const int64_t block_bytes = kv_bytes_per_token(info, hardware) * paged.block_size;
    num_blocks = paged.max_kv_memory_bytes / block_bytes;
    if (num_blocks < 1)
      throw InvalidArgument("max_kv_memory_bytes is {}; one block of {} tokens takes {}", paged.max_kv_memory_bytes,
                            paged.block_size, block_bytes);
  }
  const int64_t longest = paged.max_cache_len == 0 ? info.max_positions : paged.max_cache_len;
  return {{CacheLayout::paged, num_blocks, paged.block_size},
          paged.max_batch_size,
          std::min(longest, num_blocks * paged.block_size)};
}

int64_t blocks_per_sequence(const Geometry& geometry) {
  if (geometry.spec.layout == CacheLayout::contiguous) return 1;
  return ceil_div(geometry.max_length, geometry.spec.block_size);
}

// The upper bounds of a step of the decode or the prefill program.
SymbolValues program_bounds(const EngineOptions& options, const Geometry& geometry, int64_t vocab, bool decode) {
  const int64_t step_tokens = std::max(options.max_step_tokens, geometry.max_batch);
  const int64_t logit_rows = std::max(options.max_logit_rows, geometry.max_batch);
  SymbolValues bounds;
  bounds[Symbol::tokens] = decode ? std::min(step_tokens, std::max(kDecodeTokens, geometry.max_batch)) : step_tokens;
  bounds[Symbol::sequences] = geometry.max_batch;
  bounds[Symbol::logit_rows] = std::min(logit_rows, bounds[Symbol::tokens]);
  bounds[Symbol::max_blocks] = blocks_per_sequence(geometry);
  // Penalties need one pair for each token of the vocabulary, and no more pairs than the cache has tokens. Biases stand
  // beside them.
  bounds[Symbol::penalties] = std::min(geometry.max_batch * std::min(geometry.max_length, vocab),
                                       geometry.spec.num_blocks * geometry.spec.block_size) +
                              geometry.max_batch * kMaxBiases;
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
                                const Geometry& geometry, std::vector<Decision>* decisions,
                                std::function<void(Program&)> bind_states = {}) {
  pipeline::Environment environment{.device = device, .mode = pipeline::Mode::inference};
  environment.disabled_fusions = all_disabled(options, hardware);
  environment.op_by_op = options.op_by_op;
  const int64_t vocab = model.info().vocab;
  return {.make_graph =
              [&model, device, hardware, cache = geometry.spec, decisions] {
                models::BuiltGraph built = models::build_inference_graph(
                    model, {.device = device.get(), .hardware = &hardware, .cache = cache});
                if (decisions != nullptr) *decisions = std::move(built.decisions);
                return std::move(built.graph);
              },
          .environment = std::move(environment),
          .prefill_bounds = program_bounds(options, geometry, vocab, false),
          .decode_bounds = program_bounds(options, geometry, vocab, true),
          .bind_states = std::move(bind_states)};
}

}  // namespace

int64_t default_step_tokens(const Device& device) { return device.host_accessible() ? 512 : 2048; }

int64_t kv_bytes_per_token(const models::ModelInfo& info, const modules::AutoHardwareConfig& hardware) {
  int64_t total = 0;
  for (int layer = 0; layer < info.layers; ++layer) {
    const WeightType& stored = hardware.of(modules::Role::attention, layer).precision.kv_cache.value;
    total += 2 * TensorType(stored.dtype, {info.kv_heads, info.head_dim}, stored.encoding).size_bytes({});
  }
  return total;
}

int64_t kv_bytes_per_token(const models::Checkpoint& checkpoint, const Device& device, const EngineOptions& options) {
  return kv_bytes_per_token(checkpoint.model->info(), resolve(models::spec_of(checkpoint), device, options));
}

InferEngine::InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device,
                         const EngineOptions& options, const modules::ModelSpec& spec)
    : model_(std::move(model)),
      device_(std::move(device)),
      options_(options),
      hardware_(resolve(spec, *device_, options)) {
  if (options.dist.tp_size() != 1)
    throw Unsupported("tensor parallelism over {} ranks; this engine runs one rank", options.dist.tp_size());
  if (options.max_step_tokens == 0) options_.max_step_tokens = default_step_tokens(*device_);
  require_count("max_step_tokens", options_.max_step_tokens, 1);
  require_count("max_logit_rows", options.max_logit_rows, 0);
  parameters_ = std::make_shared<pipeline::ParameterStore>(device_);
  plan_cache();
  compile();
}

std::unique_ptr<InferEngine> InferEngine::from_checkpoint(const models::Checkpoint& checkpoint,
                                                          std::shared_ptr<Device> device, const EngineOptions& options,
                                                          const std::function<void(int64_t, int64_t)>& progress,
                                                          const Logger& log) {
  if (!options.pack_cache.empty() && !device->host_accessible())
    throw InvalidArgument("pack_cache is '{}'; {} does not run from mapped files", options.pack_cache,
                          device->description());
  auto engine =
      std::make_unique<InferEngine>(checkpoint.model, std::move(device), options, models::spec_of(checkpoint));
  models::load_weights(*engine->parameters_, checkpoint, progress,
                       {.in_place = true, .pack_cache = options.pack_cache, .log = &log});
  return engine;
}

void InferEngine::plan_cache() {
  const Geometry geometry = cache_geometry(model_->info(), hardware_, options_.cache);
  cache_ = geometry.spec;
  max_batch_ = geometry.max_batch;
  max_length_ = geometry.max_length;
}

void InferEngine::compile() {
  const Geometry geometry{cache_, max_batch_, max_length_};
  const models::ModelInfo& info = model_->info();
  const SymbolValues most = program_bounds(options_, geometry, info.vocab, false);
  programs_ =
      std::make_unique<ProgramSet>(set_options(*model_, device_, options_, hardware_, geometry, &factory_decisions_,
                                               [this](Program& program) { bind_caches(program); }),
                                   parameters_);
  for (const auto& compiled : programs_->programs()) compiled->program->require_complete();
  descriptor_ = std::make_unique<StepDescriptor>(device_, programs_->step_bytes(), cache_.block_size, info.vocab);
  const int64_t most_rows = most[Symbol::logit_rows];
  sampled_ = device_->allocate(most_rows * static_cast<int64_t>(sizeof(int32_t)));
  programs_->bind(descriptor_->device_data(), sampled_.data());
  name_values();

  num_submitted_ = num_collected_ = 0;
  for (InFlight& step : steps_) {
    step.done = device_->make_event();
    step.host = device_->allocate_on_host(most_rows * static_cast<int64_t>(sizeof(int32_t) + sizeof(float)));
    step.unseen.reserve(static_cast<size_t>(max_batch_));
  }
  const auto reserve = [](auto& list, int64_t size) { list.reserve(static_cast<size_t>(size)); };
  reserve(sequences_, max_batch_);
  reserve(output_.output_ids, most_rows);
  reserve(output_.logprobs, most_rows);
  contents_ = CacheContents(cache_.num_blocks, cache_.block_size);
  identity_.resize(static_cast<size_t>(max_batch_));
  std::iota(identity_.begin(), identity_.end(), 0);
}

// Collects the names that hooks can be registered on.
void InferEngine::name_values() {
  HookRegistry::Names names;
  for (const Program* program : {&prefill_program(), &decode_program()}) names.add(*program);
  hooks_.set_names(std::move(names));
}

ProgramSet InferEngine::compile_for_explain(const models::Model& model, const std::shared_ptr<Device>& device,
                                            const EngineOptions& given, const modules::ModelSpec& spec) {
  EngineOptions options = given;
  if (options.max_step_tokens == 0) options.max_step_tokens = default_step_tokens(*device);
  const modules::AutoHardwareConfig hardware = resolve(spec, *device, options);
  ProgramSet::Options set =
      set_options(model, device, options, hardware, cache_geometry(model.info(), hardware, options.cache), nullptr);
  return ProgramSet(std::move(set), std::make_shared<pipeline::ParameterStore>(device));
}

void InferEngine::bind_caches(Program& program) {
  for (const auto& [name, id] : program.states()) {
    auto [found, inserted] = caches_.try_emplace(name);
    const TensorType& type = program.graph().value(id).type;
    if (inserted) {
      found->second = allocate_tensor(*device_, type, {});
      // In decode, threads divide the heads of one sequence, which are stored one after another. With several
      // sequences, neither their number nor their places in the cache are known in advance.
      const bool one_sequence = cache_.layout == CacheLayout::contiguous && max_batch_ == 1;
      fill_new(*device_, found->second.view, one_sequence ? Placement::shares : Placement::interleaved);
    }
    program.bind_state(name, found->second.view);
  }
}

int64_t InferEngine::cache_bytes() const {
  int64_t total = 0;
  for (const auto& [name, cache] : caches_) {
    const std::array<Dim, 4> dims{cache.shape()[0], cache.shape()[1], cache.shape()[2], cache.shape()[3]};
    total += TensorType(cache.dtype(), dims, cache.view.encoding).size_bytes({});
  }
  return total;
}

SchedulerLimits InferEngine::limits() const {
  return {.max_batch_size = max_batch_,
          .max_step_tokens = std::max(options_.max_step_tokens, max_batch_),
          .max_sequence_length = max_length_,
          .num_blocks = cache_.num_blocks,
          .block_size = cache_.block_size,
          .vocab = model_->info().vocab,
          .model_context = model_->info().max_positions};
}

void InferEngine::load_param(const std::string& name, const TensorView& whole) {
  parameters_->load(name, whole, "load_param");
}

std::vector<std::pair<std::string, Tensor>> InferEngine::state_dict() const {
  std::vector<std::pair<std::string, Tensor>> result;
  for (const std::string& name : parameters_->names()) result.emplace_back(name, parameters_->to_host(name));
  return result;
}

void InferEngine::require_cache() const {
  if (programs_ == nullptr)
    throw InvalidArgument("the engine has no cache since reset_cache failed; call it with a smaller one");
}

void InferEngine::reset_cache() {
  require_cache();
  num_submitted_ = num_collected_ = 0;
  contents_.clear();
  for (const auto& [name, cache] : caches_) fill_zero(*device_, cache.view);
}

void InferEngine::reset_cache(const CacheConfig& config) {
  // Every check that can refuse the new configuration runs before the old cache is freed.
  cache_geometry(model_->info(), hardware_, config);
  options_.cache = config;
  last_ = nullptr;
  num_submitted_ = num_collected_ = 0;
  programs_.reset();
  caches_.clear();
  plan_cache();
  compile();
}

Tensor InferEngine::logits() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no logits");
  return copy_to_host(*device_, last_->program->view(last_->logits).rows(0, last_rows_));
}

Tensor InferEngine::hidden_states() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no hidden states");
  return copy_to_host(*device_, last_->program->view(last_->hidden).rows(0, last_tokens_));
}

}  // namespace eadem::engine
