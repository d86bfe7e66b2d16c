// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/load_llm.h"

#include <utility>

#include "eadem/cli/interrupt.h"
#include "eadem/cli/terminal.h"
#include "eadem/distributed/forked_ranks.h"
#include "eadem/models/config/model_config.h"

namespace eadem::cli {

void add_context(Arguments& arguments, std::optional<int64_t>& context, const std::string& usual) {
  arguments.option("--context", "N", context, "tokens that the KV cache holds (default: " + usual + ")");
}

void check_context(const std::optional<int64_t>& context) {
  if (context && *context < 1) throw UsageError(fmt::format("--context is {}; expected at least 1", *context));
}

void check_context(const std::optional<int64_t>& context, int64_t model_context) {
  if (context.value_or(0) > model_context)
    throw InvalidArgument("--context is {}; the model's context is {} tokens", *context, model_context);
}

void check_division(const ModelOptions& options, const models::Model& model) {
  if (model.info().heads % options.tensor_ranks != 0)
    throw InvalidArgument("--tp is {}; the model's {} attention heads do not divide by it", options.tensor_ranks,
                          model.info().heads);
  if (options.deterministic_across_tp)
    models::require_same_bits_on(model.info(), static_cast<int>(options.tensor_ranks));
  const int64_t experts = model.config() == nullptr ? 0 : model.config()->num_experts;
  if (options.expert_ranks > 1 && experts < options.expert_ranks)
    throw InvalidArgument("--ep is {}; the model has {} experts, and each process needs one", options.expert_ranks,
                          experts);
}

std::unique_ptr<distributed::RankProcesses> start_ranks(const ModelOptions& options, const models::Model& model,
                                                        engine::EngineOptions& engine_options, const MakeEngine& make) {
  if (options.ranks() == 1) return nullptr;
  check_division(options, model);
  const auto body = [&](const std::shared_ptr<Communicator>& ranks) {
    const std::shared_ptr<Device> device = options.open(ranks->rank());
    engine::follow_engines(ranks, device, [&](const engine::CacheConfig& cache, int64_t draft_tokens) {
      engine::EngineOptions own = engine_options;
      own.cache = cache;
      own.draft_tokens = draft_tokens;
      own.ranks = ranks;
      return make(device, own);
    });
  };
  std::unique_ptr<distributed::RankProcesses> ranks;
  if (options.launch)
    ranks = std::make_unique<distributed::LaunchedRanks>(*options.launch, body);
  else
    ranks = std::make_unique<distributed::ForkedRanks>(static_cast<int>(options.ranks()), body);
  engine_options.ranks = ranks->communicator();
  return ranks;
}

LoadedLlm load_llm(models::Checkpoint checkpoint, const ModelOptions& options, const Room& room) {
  engine::EngineOptions engine_options = options.engine_options();
  engine_options.cache = engine::PagedKVCacheConfig{.max_batch_size = room.sequences, .max_cache_len = room.context};
  engine_options.max_logit_rows = room.logit_rows;
  engine_options.pack_after_first_step = room.answers_at_once;
  const engine::SpeculationOptions speculation = options.speculation();
  engine_options.draft_tokens = speculation.room();
  LoadedLlm loaded;
  loaded.ranks = start_ranks(options, *checkpoint.model, engine_options,
                             [&](std::shared_ptr<Device> device, const engine::EngineOptions& own) {
                               return engine::InferEngine::from_checkpoint(checkpoint, std::move(device), own);
                             });
  ProgressBar bar("loading");
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar.update(static_cast<double>(done), static_cast<double>(total));
  };
  loaded.llm = std::make_unique<engine::LLM>(std::move(checkpoint), options.open(), engine_options, cli_logger(),
                                             progress, speculation);
  return loaded;
}

}  // namespace eadem::cli
