// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/speculation/speculation_options.h"

#include <algorithm>
#include <utility>

#include "eadem/engine/llm.h"
#include "eadem/engine/speculation/draft_model.h"
#include "eadem/engine/speculation/prompt_lookup.h"

namespace eadem::engine {

SpeculationOptions SpeculationOptions::of(std::string_view what, int64_t draft_tokens) {
  if (what.empty()) throw InvalidArgument("speculate is empty; expected none, lookup or a draft model");
  if (draft_tokens < 1 || draft_tokens > 15)
    throw InvalidArgument("draft_tokens is {}; expected 1 to 15", draft_tokens);
  if (what == "none") return {.draft_tokens = draft_tokens};
  if (what == "lookup") return {.proposer = Proposer::lookup, .draft_tokens = draft_tokens};
  return {.proposer = Proposer::model, .model = std::string(what), .draft_tokens = draft_tokens};
}

void SpeculationOptions::check(int num_ranks) const {
  if (proposer == Proposer::model && num_ranks > 1)
    throw Unsupported("a draft model ({}) beside {} ranks; lookup works with them", model, num_ranks);
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

// Makes the engine of a draft model, with a row of its cache for each sequence of the model.
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
  return InferEngine::from_checkpoint(checkpoint, engine.device(), own, progress, log);
}

}  // namespace

std::unique_ptr<Speculator> make_speculator(const SpeculationOptions& options, const InferEngine& engine,
                                            const io::Tokenizer& tokenizer, const Logger& log,
                                            const std::function<void(int64_t, int64_t)>& progress) {
  if (options.proposer == SpeculationOptions::Proposer::none) return nullptr;
  std::unique_ptr<Proposer> proposer = std::make_unique<PromptLookup>();
  if (options.proposer == SpeculationOptions::Proposer::model) {
    std::unique_ptr<InferEngine> draft = open_draft(options, engine, tokenizer, log, progress);
    // Steps of few rows wait for the weights.
    const double cost = static_cast<double>(draft->parameters().size_bytes()) /
                        static_cast<double>(std::max<int64_t>(1, engine.parameters().size_bytes()));
    proposer = std::make_unique<DraftModel>(std::move(draft), engine.model().info().vocab, cost);
  }
  return std::make_unique<Speculator>(std::move(proposer), options.draft_tokens, engine.limits().max_draft_tokens);
}

}  // namespace eadem::engine
