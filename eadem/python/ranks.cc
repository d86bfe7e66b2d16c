// SPDX-License-Identifier: Apache-2.0
//
// Engines from the arguments of Python, on one rank and on several. Ranks 1, 2, … are processes that run
// python/eadem/_rank.py, because an interpreter may have threads and cannot be forked. They get the same arguments.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include "eadem/core/machine/rank_processors.h"
#include "eadem/io/json.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

constexpr int kMostProcessors = 8192;

// Opens the device of a rank, which has its share of the threads and of the processors. The calling thread is bound to
// these.
std::shared_ptr<Device> open_rank(const EngineArguments& arguments, int rank) {
  const int ranks = arguments.dist.shape().num_ranks();
  if (ranks == 1)
    return open(arguments.device, arguments.threads, arguments.isa, arguments.prefill_threads, arguments.pin);
  const RankThreads own = rank_threads(Topology::of_this_process(), static_cast<int>(arguments.threads),
                                       static_cast<int>(arguments.prefill_threads), ranks, rank);
  if (arguments.pin) bind_to_processors(own.processors);
  return open(arguments.device, own.decode, arguments.isa, own.prefill, arguments.pin);
}

// What engines are made of: a checkpoint, or one without weights.
models::Checkpoint checkpoint_of(const EngineArguments& arguments) {
  if (!arguments.path.empty()) return models::open_checkpoint(arguments.path);
  const std::string name = "the configuration";
  const models::ModelConfig config =
      arguments.config ? *arguments.config
                       : models::ModelConfig::from_json(io::JsonReader::parse(arguments.config_text, name));
  config.validate(name);
  models::Checkpoint checkpoint;
  checkpoint.model = std::make_shared<models::Decoder>(models::with_huggingface_order(config));
  return checkpoint;
}

std::unique_ptr<engine::InferEngine> make_engine(const models::Checkpoint& checkpoint,
                                                 const std::shared_ptr<Device>& device,
                                                 const engine::EngineOptions& options, const Logger& log = Logger()) {
  if (checkpoint.weights == nullptr)
    return std::make_unique<engine::InferEngine>(checkpoint.model, device, options, checkpoint.model->spec());
  return engine::InferEngine::from_checkpoint(
      checkpoint, device, options, [](int64_t, int64_t) { stop_if_abandoned(); }, log);
}

// What a rank of another process does.
void follow(const EngineArguments& arguments, const std::shared_ptr<Communicator>& ranks) {
  engine::EngineOptions options = engine_options(arguments);
  options.ranks = ranks;
  const models::Checkpoint checkpoint = checkpoint_of(arguments);
  const std::shared_ptr<Device> device = open_rank(arguments, ranks->rank());
  engine::follow_engines(ranks, device, [&](const engine::CacheConfig& cache, int64_t draft_tokens) {
    options.cache = cache;
    options.draft_tokens = draft_tokens;
    return make_engine(checkpoint, device, options);
  });
}

}  // namespace

EngineArguments engine_arguments(const nb::kwargs& keywords) {
  EngineArguments arguments;
  const auto take = [&](const char* name, auto& value) {
    value = nb::cast<std::decay_t<decltype(value)>>(keywords[name]);
  };
  take("path", arguments.path), take("config", arguments.config_text), take("device", arguments.device);
  take("threads", arguments.threads), take("prefill_threads", arguments.prefill_threads), take("pin", arguments.pin);
  take("isa", arguments.isa), take("mode", arguments.mode), take("weights", arguments.weights);
  take("activations", arguments.activations), take("matmul_input", arguments.matmul_input);
  take("kv_dtype", arguments.kv_dtype), take("max_num_batched_tokens", arguments.max_num_batched_tokens);
  take("max_logit_rows", arguments.max_logit_rows), take("disabled_fusions", arguments.disabled_fusions);
  take("pack_cache", arguments.pack_cache);
  arguments.dist = dist_argument(keywords);
  return arguments;
}

DistConfig dist_argument(const nb::kwargs& keywords) {
  DistConfig dist;
  const auto take = [&](const char* name, auto& value) {
    value = nb::cast<std::decay_t<decltype(value)>>(keywords[name]);
  };
  take("tp_device_ids", dist.tp_device_ids), take("deterministic_across_tp", dist.deterministic_across_tp);
  take("dp_size", dist.dp_size), take("pp_size", dist.pp_size), take("ep_size", dist.ep_size);
  return dist;
}

void check_ranks(const DistConfig& dist, const std::string& device, int64_t threads, int64_t prefill_threads) {
  const int ranks = dist.shape().num_ranks();
  if (!device.starts_with("cpu")) {
    if (ranks > 1) throw Unsupported("{} ranks on '{}'; ranks compute on the CPU", ranks, device);
    if (dist.tp_device_ids != std::vector{0})
      throw InvalidArgument("tp_device_ids is [{}] and the device '{}'; one rank's device is stated by its name alone",
                            dist.tp_device_ids[0], device);
    return;
  }
  for (int rank = 0; rank < dist.tp_size(); ++rank)
    if (const int id = dist.tp_device_ids[static_cast<size_t>(rank)]; id != rank)
      throw InvalidArgument("tp_device_ids[{}] is {}; on the CPU, rank {} has device {}", rank, id, rank, rank);
  const auto enough = [&](const char* name, int64_t count) {
    if (count < 0 || count > 4096) throw InvalidArgument("{} is {}; expected 0 to 4096", name, count);
    if (count != 0 && count < ranks)
      throw InvalidArgument("{} is {}; {} ranks need at least one each", name, count, ranks);
  };
  enough("threads", threads);
  enough("prefill_threads", prefill_threads);
}

KeepsProcessors::KeepsProcessors() {
  cpu_set_t* const set = CPU_ALLOC(kMostProcessors);
  const size_t size = CPU_ALLOC_SIZE(kMostProcessors);
  if (set != nullptr && sched_getaffinity(0, size, set) == 0)
    for (int processor = 0; processor < kMostProcessors; ++processor)
      if (CPU_ISSET_S(static_cast<size_t>(processor), size, set)) processors_.push_back(processor);
  if (set != nullptr) CPU_FREE(set);
}

KeepsProcessors::~KeepsProcessors() { bind_to_processors(processors_); }

RanksOfRank0::RanksOfRank0(const EngineArguments& arguments, const models::ModelInfo& info,
                           const std::vector<std::string>& program) {
  const DistConfig& dist = arguments.dist;
  if (dist.dp_size > 1 || dist.pp_size > 1)
    throw Unsupported(
        "dp_size is {} and pp_size {}; the ranks of an engine divide tensors (tp_size) or experts (ep_size)",
        dist.dp_size, dist.pp_size);
  if (dist.tp_size() > 1 && dist.ep_size > 1)
    throw Unsupported("tp_size is {} and ep_size {}; the ranks of an engine divide either", dist.tp_size(),
                      dist.ep_size);
  check_ranks(dist, arguments.device, arguments.threads, arguments.prefill_threads);
  const int ranks = dist.shape().num_ranks();
  if (ranks > 1) {
    if (info.heads % dist.tp_size() != 0)
      throw InvalidArgument("tp_size is {}; the model's {} attention heads do not divide by it", ranks, info.heads);
    if (dist.deterministic_across_tp && dist.tp_size() > 1) models::require_same_bits_on(info, ranks);
    processes_ = std::make_unique<distributed::SpawnedRanks>(ranks, program);
  }
  const KeepsProcessors as_they_were;
  device_ = open_rank(arguments, 0);
}

engine::EngineOptions RanksOfRank0::options(const EngineArguments& arguments) const {
  engine::EngineOptions options = engine_options(arguments);
  if (processes_ != nullptr) options.ranks = processes_->communicator();
  return options;
}

RankedEngine make_ranked_engine(const EngineArguments& arguments, const std::vector<std::string>& program) {
  const models::Checkpoint checkpoint = checkpoint_of(arguments);
  RankedEngine made;
  made.ranks = std::make_unique<RanksOfRank0>(arguments, checkpoint.model->info(), program);
  made.engine = make_engine(checkpoint, made.ranks->device(), made.ranks->options(arguments), python_logger());
  return made;
}

void bind_ranks(nb::module_& m) {
  m.def(
      "follow_rank",
      [](const std::string& descriptor, const std::string& rank, const std::string& parent,
         const nb::kwargs& keywords) {
        const EngineArguments arguments = engine_arguments(keywords);
        const GilRelease release;
        distributed::live_as_spawned_rank(
            descriptor, rank, parent, [&](const std::shared_ptr<Communicator>& ranks) { follow(arguments, ranks); });
      },
      "descriptor"_a, "rank"_a, "parent"_a, "arguments"_a,
      "The life of a rank in a process of its own, which eadem/_rank.py is.");
  m.def(
      "config_text",
      [](const models::ModelConfig& config) { return io::to_json(models::with_huggingface_order(config).to_json()); },
      "config"_a, "The text of a config.json from which another process makes the same model.");
}

}  // namespace eadem::python
