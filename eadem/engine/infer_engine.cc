// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/infer_engine.h"

#include <algorithm>
#include <numeric>

namespace eadem::engine {

using modules::CacheLayout;
using modules::CacheSpec;
using pipeline::Program;

namespace {

// Steps of at most this many tokens use the decode program: its activations stay in the caches.
constexpr int64_t kDecodeTokens = 16;
// Of everything that counts tokens or sequences: products of two such numbers and of a model's sizes, which its config
// bounds, stay inside 64 bits.
constexpr int64_t kMaxCount = int64_t{1} << 24;

void require_count(const char* name, int64_t value, int64_t min) {
  if (value < min || value > kMaxCount)
    throw InvalidArgument("{} is {}; expected {} to {}", name, value, min, kMaxCount);
}

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
    if (fixed->max_cache_len < 0)
      throw InvalidArgument("max_cache_len is {}; expected at least 1", fixed->max_cache_len);
    if (fixed->max_cache_len > info.max_positions)
      throw InvalidArgument("max_cache_len is {}; the model's context is {} tokens", fixed->max_cache_len,
                            info.max_positions);
    const int64_t length = fixed->max_cache_len == 0 ? info.max_positions : fixed->max_cache_len;
    return {{CacheLayout::contiguous, fixed->max_batch_size, length}, fixed->max_batch_size, length};
  }
  PagedKVCacheConfig paged = std::get<PagedKVCacheConfig>(config);
  if (paged.block_size == 0) paged.block_size = hardware.of(modules::Role::attention).memory.kv_block_size.value;
  require_count("block_size", paged.block_size, 1);
  require_count("max_batch_size", paged.max_batch_size, 1);
  const int64_t block_bytes = kv_bytes_per_token(info, hardware) * paged.block_size;
  const int64_t num_blocks = paged.max_kv_memory_bytes / block_bytes;
  if (num_blocks < 1)
    throw InvalidArgument("max_kv_memory_bytes is {}; one block of {} tokens takes {}", paged.max_kv_memory_bytes,
                          paged.block_size, block_bytes);
  return {{CacheLayout::paged, num_blocks, paged.block_size},
          paged.max_batch_size,
          std::min(info.max_positions, num_blocks * paged.block_size)};
}

SymbolValues bucket(int64_t tokens, int64_t sequences, int64_t logit_rows, int64_t max_blocks) {
  SymbolValues bounds;
  bounds[Symbol::tokens] = tokens;
  bounds[Symbol::sequences] = sequences;
  bounds[Symbol::logit_rows] = logit_rows;
  bounds[Symbol::max_blocks] = max_blocks;
  return bounds;
}

std::vector<std::string> all_disabled(const EngineOptions& options, const modules::AutoHardwareConfig& hardware) {
  std::vector<std::string> result = options.disabled_fusions;
  for (std::string& name : hardware.disabled_fusions()) result.push_back(std::move(name));
  return result;
}

// The threads of a step for the time of its run.
class StepThreads {
 public:
  StepThreads(Device& device, StepKind kind) : device_(device) { device_.set_step_kind(kind); }
  StepThreads(const StepThreads&) = delete;
  StepThreads& operator=(const StepThreads&) = delete;
  ~StepThreads() { device_.set_step_kind(StepKind::many_rows); }

 private:
  Device& device_;
};

}  // namespace

int64_t kv_bytes_per_token(const models::ModelInfo& info, const modules::AutoHardwareConfig& hardware) {
  int64_t total = 0;
  for (int layer = 0; layer < info.layers; ++layer) {
    const WeightType& stored = hardware.of(modules::Role::attention, layer).precision.kv_cache.value;
    total += 2 * TensorType(stored.dtype, {info.kv_heads, info.head_dim}, stored.encoding).size_bytes({});
  }
  return total;
}

InferEngine::InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device,
                         const EngineOptions& options, const modules::ModelSpec& spec)
    : model_(std::move(model)),
      device_(std::move(device)),
      options_(options),
      hardware_(resolve(spec, *device_, options)) {
  if (options.dist.tp_size() != 1)
    throw Unsupported("tensor parallelism over {} ranks; this engine runs one rank", options.dist.tp_size());
  require_count("max_step_tokens", options.max_step_tokens, 1);
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

int64_t InferEngine::blocks_per_sequence() const {
  return cache_.layout == CacheLayout::contiguous ? 1 : (max_length_ + cache_.block_size - 1) / cache_.block_size;
}

void InferEngine::compile() {
  const int64_t logit_rows = std::max(options_.max_logit_rows, max_batch_);
  const int64_t step_tokens = std::max(options_.max_step_tokens, max_batch_);
  prefill_ = compile_bucket(bucket(step_tokens, max_batch_, logit_rows, blocks_per_sequence()));
  const int64_t decode_tokens = std::min(step_tokens, std::max(kDecodeTokens, max_batch_));
  decode_ =
      compile_bucket(bucket(decode_tokens, max_batch_, std::min(logit_rows, decode_tokens), blocks_per_sequence()));

  const auto tokens = static_cast<size_t>(step_tokens), batch = static_cast<size_t>(max_batch_),
             rows = static_cast<size_t>(logit_rows);
  staging_.positions.reserve(tokens);
  staging_.slots.reserve(tokens);
  staging_.query_start.reserve(batch + 1);
  staging_.kv_length.reserve(batch);
  staging_.block_table.reserve(batch * static_cast<size_t>(blocks_per_sequence()));
  for (auto* list : {&staging_.logit_rows, &staging_.top_k}) list->reserve(rows);
  for (auto* list : {&staging_.seed, &staging_.draw_position}) list->reserve(rows);
  for (auto* list : {&staging_.temperature, &staging_.top_p, &staging_.min_p}) list->reserve(rows);
  output_.output_ids.reserve(rows);
  output_.logprobs.reserve(rows);
}

std::unique_ptr<Program> InferEngine::compile_for_explain(const models::Model& model, std::shared_ptr<Device> device,
                                                          const EngineOptions& options, const modules::ModelSpec& spec,
                                                          bool decode) {
  const modules::AutoHardwareConfig hardware = resolve(spec, *device, options);
  const Geometry geometry = cache_geometry(model.info(), hardware, options.cache);
  models::BuiltGraph built =
      models::build_inference_graph(model, {.device = device.get(), .hardware = &hardware, .cache = geometry.spec});
  const int64_t blocks = geometry.spec.layout == CacheLayout::contiguous
                             ? 1
                             : (geometry.max_length + geometry.spec.block_size - 1) / geometry.spec.block_size;
  const int64_t tokens = decode ? geometry.max_batch : std::max(options.max_step_tokens, geometry.max_batch);
  pipeline::Environment environment{.device = device, .mode = pipeline::Mode::inference};
  environment.bounds = bucket(tokens, geometry.max_batch, geometry.max_batch, blocks);
  environment.disabled_fusions = all_disabled(options, hardware);
  environment.op_by_op = options.op_by_op;
  return std::make_unique<Program>(std::move(built.graph), environment,
                                   std::make_shared<pipeline::ParameterStore>(device));
}

std::unique_ptr<InferEngine::Compiled> InferEngine::compile_bucket(const SymbolValues& bounds) {
  models::BuiltGraph built =
      models::build_inference_graph(*model_, {.device = device_.get(), .hardware = &hardware_, .cache = cache_});
  factory_decisions_ = std::move(built.decisions);
  pipeline::Environment environment{.device = device_, .mode = pipeline::Mode::inference};
  environment.bounds = bounds;
  environment.disabled_fusions = all_disabled(options_, hardware_);
  environment.op_by_op = options_.op_by_op;
  auto compiled = std::make_unique<Compiled>();
  compiled->program = std::make_unique<Program>(std::move(built.graph), environment, parameters_);
  Program& program = *compiled->program;
  program.require_complete();
  bind_caches(program);
  compiled->token_ids = program.input("token_ids");
  compiled->positions = program.input("positions");
  compiled->query_start = program.input("query_start");
  compiled->kv_length = program.input("kv_length");
  compiled->block_table = program.input("block_table");
  compiled->slots = program.input("slots");
  compiled->logit_rows = program.input("logit_rows");
  compiled->temperature = program.input("temperature");
  compiled->top_k = program.input("top_k");
  compiled->top_p = program.input("top_p");
  compiled->min_p = program.input("min_p");
  compiled->seed = program.input("seed");
  compiled->draw_position = program.input("draw_position");
  compiled->hidden = program.output("hidden");
  compiled->logits = program.output("logits");
  compiled->token = program.output("token");
  compiled->logprob = program.output("logprob");
  return compiled;
}

void InferEngine::bind_caches(Program& program) {
  for (const auto& [name, id] : program.states()) {
    auto [found, inserted] = caches_.try_emplace(name);
    const TensorType& type = program.graph().value(id).type;
    if (inserted) {
      found->second = allocate_tensor(*device_, type, {});
      // The threads of decode share out the heads of one sequence, which lie one after another. Of several sequences
      // nobody knows which will be there, or where.
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

void InferEngine::load_param(const std::string& name, const TensorView& whole) {
  parameters_->load(name, whole, "load_param");
}

std::vector<std::pair<std::string, Tensor>> InferEngine::state_dict() const {
  std::vector<std::pair<std::string, Tensor>> result;
  for (const std::string& name : parameters_->names()) result.emplace_back(name, parameters_->to_host(name));
  return result;
}

void InferEngine::require_cache() const {
  if (decode_ == nullptr)
    throw InvalidArgument("the engine has no cache since reset_cache failed; call it with a smaller one");
}

void InferEngine::reset_cache() {
  require_cache();
  for (const auto& [name, cache] : caches_) fill_zero(*device_, cache.view);
}

void InferEngine::reset_cache(const CacheConfig& config) {
  // Everything that can refuse the new configuration refuses before anything is given up.
  cache_geometry(model_->info(), hardware_, config);
  options_.cache = config;
  last_ = nullptr;
  prefill_.reset();
  decode_.reset();
  caches_.clear();
  plan_cache();
  compile();
}

void InferEngine::check(const Input& input) const {
  const auto batch = static_cast<int64_t>(input.input_lengths.size());
  const auto tokens = static_cast<int64_t>(input.input_ids.size());
  if (batch < 1 || batch > max_batch_)
    throw InvalidArgument("the step has {} sequences; expected 1 to {}", batch, max_batch_);
  if (tokens > prefill_->program->environment().bounds[Symbol::tokens])
    throw InvalidArgument("the step has {} tokens; at most {} fit (max_step_tokens)", tokens,
                          prefill_->program->environment().bounds[Symbol::tokens]);
  const auto same = [&](const char* name, size_t size, int64_t expected, bool optional) {
    if ((!optional || size > 0) && static_cast<int64_t>(size) != expected)
      throw InvalidArgument("{} has {} entries; expected {}", name, size, expected);
  };
  same("cache_lengths", input.cache_lengths.size(), batch, false);
  same("position_ids", input.position_ids.size(), tokens, true);
  same("block_tables", input.block_tables.size(), batch, cache_.layout == CacheLayout::contiguous);
  same("slot_mapping", input.slot_mapping.size(), tokens, true);
  same("sampling", input.sampling.size(), batch, true);
  const int64_t rows = input.all_logits ? tokens : batch;
  if (rows > prefill_->program->environment().bounds[Symbol::logit_rows])
    throw InvalidArgument("the step asks for {} rows of logits; at most {} fit (max_logit_rows)", rows,
                          prefill_->program->environment().bounds[Symbol::logit_rows]);

  int64_t first = 0;
  for (int64_t s = 0; s < batch; ++s) {
    const auto i = static_cast<size_t>(s);
    const int64_t length = input.input_lengths[i], cached = input.cache_lengths[i];
    if (length < 1) throw InvalidArgument("sequence {} has {} new tokens; expected at least 1", s, length);
    if (cached < 0) throw InvalidArgument("sequence {} has {} cached tokens", s, cached);
    if (cached + length > max_length_)
      throw InvalidArgument("sequence {} would have {} tokens ({} cached + {} new); the cache holds {}", s,
                            cached + length, cached, length, max_length_);
    if (!input.block_tables.empty()) {
      const std::vector<int32_t>& blocks = input.block_tables[i];
      const int64_t needed = (cached + length + cache_.block_size - 1) / cache_.block_size;
      if (static_cast<int64_t>(blocks.size()) < needed || static_cast<int64_t>(blocks.size()) > blocks_per_sequence())
        throw InvalidArgument("sequence {} has {} blocks; {} tokens need {}, at most {} fit", s, blocks.size(),
                              cached + length, needed, blocks_per_sequence());
      for (int32_t block : blocks)
        if (block < 0 || block >= cache_.num_blocks)
          throw InvalidArgument("sequence {} names block {}; there are {}", s, block, cache_.num_blocks);
    }
    if (first + length > tokens)
      throw InvalidArgument("input_lengths add up to more than the {} input_ids at sequence {}", tokens, s);
    for (int64_t t = first; t < first + length; ++t) {
      const auto at = static_cast<size_t>(t);
      if (input.input_ids[at] < 0 || input.input_ids[at] >= model_->info().vocab)
        throw InvalidArgument("token {} of sequence {} is {}; the vocabulary has {}", t - first, s, input.input_ids[at],
                              model_->info().vocab);
      if (!input.position_ids.empty() && input.position_ids[at] != cached + t - first)
        throw InvalidArgument("position {} of token {} of sequence {}; its place in the cache is {}",
                              input.position_ids[at], t - first, s, cached + t - first);
      if (!input.slot_mapping.empty()) {
        const int64_t slot = input.slot_mapping[at], position = cached + t - first;
        const int64_t block =
            input.block_tables.empty() ? s : input.block_tables[i][static_cast<size_t>(position / cache_.block_size)];
        const int64_t expected = block * cache_.block_size + position % cache_.block_size;
        if (slot != expected)
          throw InvalidArgument("slot {} of token {} of sequence {}; its block table says {}", slot, t - first, s,
                                expected);
      }
    }
    first += length;
  }
  if (first != tokens) throw InvalidArgument("input_lengths add up to {}; there are {} input_ids", first, tokens);
  for (size_t i = 0; i < input.sampling.size(); ++i) {
    const SamplingInput& p = input.sampling[i];
    if (!(p.temperature >= 0) || p.temperature > 1e6f || p.top_k < 0 || !(p.top_p > 0 && p.top_p <= 1) ||
        !(p.min_p >= 0 && p.min_p <= 1))
      throw InvalidArgument(
          "sequence {}: temperature {} (0 to 1e6), top_k {} (0 or more), top_p {} (above 0, to 1), min_p {} (0 to 1): "
          "one is out of range",
          i, p.temperature, p.top_k, p.top_p, p.min_p);
  }
}

void InferEngine::stage(const Input& input) {
  Staging& s = staging_;
  for (auto* list : {&s.positions, &s.query_start, &s.kv_length, &s.block_table, &s.logit_rows, &s.top_k})
    list->clear();
  for (auto* list : {&s.slots, &s.seed, &s.draw_position}) list->clear();
  for (auto* list : {&s.temperature, &s.top_p, &s.min_p}) list->clear();
  const size_t batch = input.input_lengths.size();
  size_t widest = 1;
  for (const std::vector<int32_t>& blocks : input.block_tables) widest = std::max(widest, blocks.size());
  s.query_start.push_back(0);
  for (size_t i = 0; i < batch; ++i) {
    const int32_t first = s.query_start.back(), length = input.input_lengths[i], cached = input.cache_lengths[i];
    for (size_t b = 0; b < widest; ++b) {
      const bool identity = input.block_tables.empty();
      const bool past_end = !identity && b >= input.block_tables[i].size();
      s.block_table.push_back(identity ? static_cast<int32_t>(i) : past_end ? 0 : input.block_tables[i][b]);
    }
    const int32_t* table = s.block_table.data() + i * widest;
    for (int32_t t = 0; t < length; ++t) {
      const int64_t position = cached + t;
      s.positions.push_back(static_cast<int32_t>(position));
      s.slots.push_back(table[position / cache_.block_size] * cache_.block_size + position % cache_.block_size);
    }
    s.query_start.push_back(first + length);
    s.kv_length.push_back(cached + length);
    const SamplingInput sampling = input.sampling.empty() ? SamplingInput{.temperature = 0.0f} : input.sampling[i];
    for (int32_t t = input.all_logits ? 0 : length - 1; t < length; ++t) {
      s.logit_rows.push_back(first + t);
      s.temperature.push_back(sampling.temperature);
      s.top_k.push_back(sampling.top_k);
      s.top_p.push_back(sampling.top_p);
      s.min_p.push_back(sampling.min_p);
      s.seed.push_back(sampling.seed);
      s.draw_position.push_back(cached + t + 1);
    }
  }
  symbols_[Symbol::tokens] = static_cast<int64_t>(input.input_ids.size());
  symbols_[Symbol::sequences] = static_cast<int64_t>(batch);
  symbols_[Symbol::logit_rows] = static_cast<int64_t>(s.logit_rows.size());
  symbols_[Symbol::max_blocks] = static_cast<int64_t>(widest);
}

const InferEngine::Output& InferEngine::forward(const Input& input, const std::atomic<bool>* cancel) {
  require_cache();
  if (!all_loaded_) {
    parameters_->require_all_loaded("the engine");
    all_loaded_ = true;
  }
  check(input);
  stage(input);
  const SymbolValues& decode_bounds = decode_->program->environment().bounds;
  const bool fits_decode = symbols_[Symbol::tokens] <= decode_bounds[Symbol::tokens] &&
                           symbols_[Symbol::logit_rows] <= decode_bounds[Symbol::logit_rows];
  const Compiled& c = fits_decode ? *decode_ : *prefill_;
  last_ = nullptr;
  const auto set = [&](pipeline::ValueId id, const auto& list) {
    c.program->set_input(id, list.data(), static_cast<int64_t>(list.size() * sizeof(list[0])));
  };
  set(c.token_ids, input.input_ids);
  set(c.positions, staging_.positions);
  set(c.query_start, staging_.query_start);
  set(c.kv_length, staging_.kv_length);
  set(c.block_table, staging_.block_table);
  set(c.slots, staging_.slots);
  set(c.logit_rows, staging_.logit_rows);
  set(c.temperature, staging_.temperature);
  set(c.top_k, staging_.top_k);
  set(c.top_p, staging_.top_p);
  set(c.min_p, staging_.min_p);
  set(c.seed, staging_.seed);
  set(c.draw_position, staging_.draw_position);

  const StepThreads threads(*device_, fits_decode ? StepKind::few_rows : StepKind::many_rows);
  if (hooks_.has_hooks()) [[unlikely]] {
    const pipeline::StepObserver observer = hooks_.observer(*c.program);
    c.program->run(symbols_, &observer, cancel);
  } else {
    c.program->run(symbols_, nullptr, cancel);
  }
  last_ = &c;
  output_.output_ids.resize(staging_.logit_rows.size());
  output_.logprobs.resize(staging_.logit_rows.size());
  c.program->read(c.token, output_.output_ids.data());
  c.program->read(c.logprob, output_.logprobs.data());
  return output_;
}

Tensor InferEngine::logits() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no logits");
  return copy_to_host(*device_, last_->program->view(last_->logits));
}

Tensor InferEngine::hidden_states() const {
  if (last_ == nullptr) throw InvalidArgument("no step has run yet: there are no hidden states");
  return copy_to_host(*device_, last_->program->view(last_->hidden));
}

}  // namespace eadem::engine
