// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/speculation_options.h"

#include <algorithm>
#include <utility>

#include "eadem/engine/llm.h"
#include "eadem/engine/speculation/draft_model.h"
#include "eadem/engine/speculation/mtp_head.h"
#include "eadem/engine/speculation/prompt_lookup.h"
#include "eadem/models/mtp_model.h"

namespace eadem::engine {

SpeculationOptions SpeculationOptions::of(std::string_view what, int64_t draft_tokens) {
  if (what.empty()) throw InvalidArgument("speculate is empty; expected none, lookup, mtp or a draft model");
  if (draft_tokens < 1 || draft_tokens > 15)
    throw InvalidArgument("draft_tokens is {}; expected 1 to 15", draft_tokens);
  if (what == "none") return {.draft_tokens = draft_tokens};
  if (what == "lookup") return {.proposer = Proposer::lookup, .draft_tokens = draft_tokens};
  if (what == "mtp") return {.proposer = Proposer::mtp, .draft_tokens = draft_tokens};
  return {.proposer = Proposer::model, .model = std::string(what), .draft_tokens = draft_tokens};
}

void require_same_tokens(const io::Tokenizer& model, const io::Tokenizer& draft) {
  if (model.vocab_size() != draft.vocab_size())
    throw Unsupported("the draft model: {} has {} tokens, {} of the model has {}; they must be the same",
                      draft.source(), draft.vocab_size(), model.source(), model.vocab_size());
  const auto text = [](const io::Tokenizer& tokenizer, int32_t id) {
    return tokenizer.is_token(id) ? fmt::format("'{}'", tokenizer.token_text(id)) : std::string("none");
  };
  for (int32_t id = 0; id < model.vocab_size(); ++id)
    if (const std::string ours = text(model, id), other = text(draft, id); ours != other)
      throw Unsupported("the draft model: token {} is {} in {}, {} in {} of the model; they must be the same", id,
                        other, draft.source(), ours, model.source());
}

namespace {

// Makes the engine of a draft model, with a row of its cache for each sequence of the model. Rank 0 has all of it, as
// it has of an MTP head.
std::unique_ptr<InferEngine> open_draft(const SpeculationOptions& options, const InferEngine& engine,
                                        const io::Tokenizer& tokenizer, const Logger& log,
                                        const std::function<void(int64_t, int64_t)>& progress) {
  const models::Checkpoint checkpoint = models::open_checkpoint(options.model);
  require_same_tokens(tokenizer, open_tokenizer(checkpoint));
  EngineOptions own;
  own.mode = engine.options().mode;
  own.disabled_fusions = engine.options().disabled_fusions;
  own.pack_cache = engine.options().pack_cache;
  own.cache = StaticKVCacheConfig{
      .max_batch_size = engine.max_batch_size(),
      .max_cache_len = std::min(engine.max_sequence_length(), checkpoint.model->info().default_context())};
  // None of its steps has proposed tokens, but states per sequence go back to before them.
  if (cache_request(checkpoint, *engine.device(), own).bytes.per_sequence > 0) own.draft_tokens = 1;
  return InferEngine::from_checkpoint(checkpoint, engine.device(), own, progress, log);
}

// Options of the engine of an MTP head, from those of the model's. The head is one layer: rank 0, where the hidden
// states are and where tokens are proposed, has all of it, and tells the other ranks what it proposes as part of a
// step.
EngineOptions head_options(EngineOptions options, int64_t batch, int64_t length) {
  options.ranks = nullptr;
  options.draft_tokens = options.max_logit_rows = 0;
  options.cache = StaticKVCacheConfig{.max_batch_size = batch, .max_cache_len = length};
  return options;
}

// Makes the engine of the model's own MTP head, with a row of its cache for each sequence of the model. All of them
// together have room for as many tokens as the model's cache, or for what may wait of each.
std::unique_ptr<InferEngine> open_mtp(const models::Checkpoint& checkpoint, const InferEngine& engine,
                                      const Logger& log, const std::function<void(int64_t, int64_t)>& progress) {
  const int64_t share = engine.cache_spec().num_blocks * engine.cache_spec().block_size / engine.max_batch_size();
  const EngineOptions own =
      head_options(engine.options(), engine.max_batch_size(),
                   std::min(engine.max_sequence_length(), std::max(share, 2 * MtpHead::kMostWaiting)));
  return InferEngine::from_checkpoint(models::mtp_checkpoint(checkpoint), engine.device(), own, progress, log);
}

// Estimates the time of a step of `proposer` in steps of `engine`: few rows take as long as reading the weights.
double cost_of(const InferEngine& proposer, const InferEngine& engine) {
  return static_cast<double>(proposer.parameters().size_bytes()) /
         static_cast<double>(std::max<int64_t>(1, engine.parameters().size_bytes()));
}

}  // namespace

void require_proposer(const SpeculationOptions& options, const models::Checkpoint& checkpoint,
                      const std::shared_ptr<Device>& device, const EngineOptions& engine_options) {
  if (options.proposer != SpeculationOptions::Proposer::mtp) return;
  const models::Checkpoint head = models::mtp_checkpoint(checkpoint);
  const int64_t batch =
      std::max<int64_t>(1, std::visit([](const auto& cache) { return cache.max_batch_size; }, engine_options.cache));
  const int64_t length = std::min(head.model->info().max_positions, 2 * MtpHead::kMostWaiting);
  try {
    const ProgramSet programs = InferEngine::compile_for_explain(
        *head.model, device, head_options(engine_options, batch, length), models::spec_of(head));
    for (const auto& each : programs.programs()) each->program->require_complete();
  } catch (const Unsupported& refusal) {
    throw Unsupported("the head for multi-token prediction (MTP) of {}: {}", head.model->info().architecture,
                      refusal.what());
  }
}

std::unique_ptr<Speculator> make_speculator(const SpeculationOptions& options, const models::Checkpoint& checkpoint,
                                            const InferEngine& engine, const io::Tokenizer& tokenizer,
                                            const Logger& log, const std::function<void(int64_t, int64_t)>& progress) {
  std::unique_ptr<Proposer> proposer;
  switch (options.proposer) {
    case SpeculationOptions::Proposer::none: return nullptr;
    case SpeculationOptions::Proposer::lookup: proposer = std::make_unique<PromptLookup>(); break;
    case SpeculationOptions::Proposer::model: {
      std::unique_ptr<InferEngine> draft = open_draft(options, engine, tokenizer, log, progress);
      const double cost = cost_of(*draft, engine);
      proposer = std::make_unique<DraftModel>(std::move(draft), engine.model().info().vocab, cost);
      break;
    }
    case SpeculationOptions::Proposer::mtp: {
      std::unique_ptr<InferEngine> head = open_mtp(checkpoint, engine, log, progress);
      const double cost = cost_of(*head, engine);
      proposer = std::make_unique<MtpHead>(std::move(head), engine, cost);
      break;
    }
  }
  const SchedulerLimits limits = engine.limits();
  return std::make_unique<Speculator>(std::move(proposer), options.draft_tokens, limits.max_draft_tokens,
                                      limits.num_slots > 0);
}

}  // namespace eadem::engine
