// SPDX-License-Identifier: Apache-2.0
//
// One step of an InferEngine: its input is checked, laid out for the device, and run.
#include <algorithm>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/sampling_params.h"

namespace eadem::engine {

using kernels::SampleRow;
using modules::CacheLayout;

namespace {

// Tells the device the kind of a step, which chooses its threads, for as long as the step runs.
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

// --- An input becomes the sequences of a step.

void InferEngine::check_sizes(const Input& input) const {
  const auto batch = std::ssize(input.input_lengths), tokens = std::ssize(input.input_ids);
  if (batch < 1 || batch > max_batch_)
    throw InvalidArgument("the step has {} sequences; expected 1 to {}", batch, max_batch_);
  const auto same = [&](const char* name, size_t size, int64_t expected, bool optional) {
    if ((!optional || size > 0) && static_cast<int64_t>(size) != expected)
      throw InvalidArgument("{} has {} entries; expected {}", name, size, expected);
  };
  same("cache_lengths", input.cache_lengths.size(), batch, false);
  same("position_ids", input.position_ids.size(), tokens, true);
  same("block_tables", input.block_tables.size(), batch, cache_.layout == CacheLayout::contiguous);
  same("slot_mapping", input.slot_mapping.size(), tokens, true);
  same("sampling", input.sampling.size(), batch, true);
  same("unfinished", input.unfinished.size(), batch, true);
  if (input.all_logits && !input.unfinished.empty())
    throw InvalidArgument("all_logits asks for a row of logits of every token, unfinished for none of some sequences");
}

void InferEngine::make_sequences(const Input& input) {
  sequences_.clear();
  const auto tokens = std::ssize(input.input_ids);
  int64_t first = 0;
  for (size_t s = 0; s < input.input_lengths.size(); ++s) {
    const int64_t length = input.input_lengths[s];
    if (length < 1) throw InvalidArgument("sequence {} has {} new tokens; expected at least 1", s, length);
    if (first + length > tokens)
      throw InvalidArgument("input_lengths add up to more than the {} input_ids at sequence {}", tokens, s);
    sequences_.push_back(
        {.tokens = std::span(input.input_ids).subspan(static_cast<size_t>(first), static_cast<size_t>(length)),
         .cached = input.cache_lengths[s],
         .blocks = input.block_tables.empty() ? std::span<const int32_t>(identity_).subspan(s, 1)
                                              : std::span(input.block_tables[s]),
         .sampling = input.sampling.empty() ? SamplingInput{} : input.sampling[s],
         .samples = input.unfinished.empty() || input.unfinished[s] == 0});
    first += length;
  }
  if (first != tokens) throw InvalidArgument("input_lengths add up to {}; there are {} input_ids", first, tokens);
}

// Checks the positions and slots of a checked input against those that its sequences have.
void InferEngine::check_places(const Input& input) const {
  size_t at = 0;
  for (size_t s = 0; s < sequences_.size(); ++s)
    for (int64_t t = 0; t < std::ssize(sequences_[s].tokens); ++t, ++at) {
      const int64_t position = sequences_[s].cached + t;
      if (!input.position_ids.empty() && input.position_ids[at] != position)
        throw InvalidArgument("position {} of token {} of sequence {}; its place in the cache is {}",
                              input.position_ids[at], t, s, position);
      if (!input.slot_mapping.empty() && input.slot_mapping[at] != slot_of(sequences_[s], position))
        throw InvalidArgument("slot {} of token {} of sequence {}; its block table says {}", input.slot_mapping[at], t,
                              s, slot_of(sequences_[s], position));
    }
}

// --- Checks. They change nothing except the engine's record of which step uses which block.

void InferEngine::check(Plan plan, bool all_logits) {
  const SymbolValues& bounds = prefill_->program->environment().bounds;
  int64_t tokens = 0, rows = 0;
  for (const StepSequence& sequence : plan) {
    tokens += std::ssize(sequence.tokens);
    rows += all_logits ? std::ssize(sequence.tokens) : sequence.samples ? 1 : 0;
  }
  if (plan.empty() || std::ssize(plan) > max_batch_)
    throw InvalidArgument("the step has {} sequences; expected 1 to {}", plan.size(), max_batch_);
  if (tokens > bounds[Symbol::tokens])
    throw InvalidArgument("the step has {} tokens; at most {} fit (max_step_tokens)", tokens, bounds[Symbol::tokens]);
  if (rows > bounds[Symbol::logit_rows])
    throw InvalidArgument(
        "the step asks for {} rows of logits; at most {} fit: set max_logit_rows of the engine to {} or more", rows,
        bounds[Symbol::logit_rows], rows);
  contents_.begin_step();
  for (size_t s = 0; s < plan.size(); ++s) {
    check_sequence(s, plan[s]);
    contents_.check(static_cast<int64_t>(s), used_blocks(plan[s]), plan[s].cached, std::ssize(plan[s].tokens));
  }
  check_sampling(plan);
}

void InferEngine::check_sequence(size_t index, const StepSequence& sequence) const {
  const int64_t length = std::ssize(sequence.tokens), cached = sequence.cached;
  if (length < 1) throw InvalidArgument("sequence {} has {} new tokens; expected at least 1", index, length);
  if (cached < 0) throw InvalidArgument("sequence {} has {} cached tokens", index, cached);
  if (cached + length > max_length_)
    throw InvalidArgument("sequence {} would have {} tokens ({} cached + {} new); the cache holds {}", index,
                          cached + length, cached, length, max_length_);
  const int64_t needed = blocks_for(cached + length);
  const int64_t most = prefill_->program->environment().bounds[Symbol::max_blocks];
  if (std::ssize(sequence.blocks) < needed || std::ssize(sequence.blocks) > most)
    throw InvalidArgument("sequence {} has {} blocks; {} tokens need {}, at most {} fit", index, sequence.blocks.size(),
                          cached + length, needed, most);
  for (int32_t block : sequence.blocks)
    if (block < 0 || block >= cache_.num_blocks)
      throw InvalidArgument("sequence {} names block {}; there are {}", index, block, cache_.num_blocks);
  for (int64_t t = 0; t < length; ++t)
    if (const int32_t token = sequence.tokens[static_cast<size_t>(t)]; token < 0 || token >= model_->info().vocab)
      throw InvalidArgument("token {} of sequence {} is {}; the vocabulary has {}", t, index, token,
                            model_->info().vocab);
}

void InferEngine::check_sampling(Plan plan) const {
  int64_t penalized = 0;
  for (size_t s = 0; s < plan.size(); ++s) {
    try {
      check_range(plan[s].sampling);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("sequence {}: {}", s, error.what());
    }
    if (plan[s].sampling.has_penalties())
      penalized += std::min<int64_t>(plan[s].cached + std::ssize(plan[s].tokens), model_->info().vocab);
  }
  const int64_t most = prefill_->program->environment().bounds[Symbol::penalties];
  if (penalized > most)  // sequences that share blocks
    throw InvalidArgument("the step's penalties look at {} tokens; at most the cache's {} fit", penalized, most);
}

int64_t InferEngine::blocks_for(int64_t tokens) const { return (tokens + cache_.block_size - 1) / cache_.block_size; }

std::span<const int32_t> InferEngine::used_blocks(const StepSequence& sequence) const {
  return sequence.blocks.first(static_cast<size_t>(blocks_for(sequence.cached + std::ssize(sequence.tokens))));
}

int64_t InferEngine::slot_of(const StepSequence& sequence, int64_t position) const {
  const int64_t block = sequence.blocks[static_cast<size_t>(position / cache_.block_size)];
  return block * cache_.block_size + position % cache_.block_size;
}

// --- Layout.

void InferEngine::stage(Plan plan, bool all_logits) {
  Staging& s = staging_;
  for (auto* list :
       {&s.token_ids, &s.positions, &s.query_start, &s.kv_length, &s.block_table, &s.logit_rows, &s.penalties})
    list->clear();
  s.slots.clear();
  s.sample_rows.clear();
  size_t widest = 1;
  for (const StepSequence& sequence : plan) widest = std::max(widest, used_blocks(sequence).size());
  s.query_start.push_back(0);
  for (const StepSequence& sequence : plan) {
    const auto first = s.query_start.back(), length = static_cast<int32_t>(sequence.tokens.size()),
               cached = static_cast<int32_t>(sequence.cached);
    const std::span<const int32_t> blocks = used_blocks(sequence);
    for (size_t b = 0; b < widest; ++b) s.block_table.push_back(b < blocks.size() ? blocks[b] : 0);
    s.token_ids.insert(s.token_ids.end(), sequence.tokens.begin(), sequence.tokens.end());
    for (int32_t position = cached; position < cached + length; ++position) {
      s.positions.push_back(position);
      s.slots.push_back(slot_of(sequence, position));
    }
    s.query_start.push_back(first + length);
    s.kv_length.push_back(cached + length);
    if (!sequence.samples) continue;
    for (int32_t t = all_logits ? 0 : length - 1; t < length; ++t) {
      s.logit_rows.push_back(first + t);
      s.sample_rows.push_back({.settings = sequence.sampling, .position = cached + t + 1});
    }
    if (sequence.sampling.has_penalties()) stage_penalties(sequence, s.sample_rows.back());
  }
  symbols_[Symbol::tokens] = std::ssize(s.token_ids);
  symbols_[Symbol::sequences] = std::ssize(plan);
  symbols_[Symbol::logit_rows] = std::ssize(s.logit_rows);
  symbols_[Symbol::max_blocks] = static_cast<int64_t>(widest);
  symbols_[Symbol::penalties] = std::ssize(s.penalties) / 2;
}

// Lists the distinct tokens of a sequence with the number of times that each was generated.
void InferEngine::stage_penalties(const StepSequence& sequence, SampleRow& row) {
  Staging& s = staging_;
  row.penalties_begin = static_cast<int32_t>(s.penalties.size() / 2);
  const auto count = [&](int32_t token, int64_t position) {
    int32_t& pair = s.pair_of_token[static_cast<size_t>(token)];
    if (pair < 0) {
      pair = static_cast<int32_t>(s.penalties.size() / 2);
      s.penalties.push_back(token);
      s.penalties.push_back(0);
    }
    if (position >= row.settings.prompt_length) ++s.penalties[2 * static_cast<size_t>(pair) + 1];
  };
  const std::span<const int32_t> blocks = used_blocks(sequence);
  for (int64_t position = 0; position < sequence.cached; ++position) count(contents_.token(blocks, position), position);
  for (int64_t position = sequence.cached; int32_t token : sequence.tokens) count(token, position++);
  row.penalties_end = static_cast<int32_t>(s.penalties.size() / 2);
  for (int32_t pair = row.penalties_begin; pair < row.penalties_end; ++pair)
    s.pair_of_token[static_cast<size_t>(s.penalties[2 * static_cast<size_t>(pair)])] = -1;
}

// --- The step.

const InferEngine::Output& InferEngine::forward(const Input& input, const std::atomic<bool>* cancel) {
  require_cache();
  check_sizes(input);
  make_sequences(input);
  check(sequences_, input.all_logits);
  check_places(input);
  return run_step(sequences_, input.all_logits, cancel);
}

const InferEngine::Output& InferEngine::forward(Plan plan, const std::atomic<bool>* cancel) {
  require_cache();
  check(plan, false);
  return run_step(plan, false, cancel);
}

const InferEngine::Output& InferEngine::run_step(Plan plan, bool all_logits, const std::atomic<bool>* cancel) {
  if (!all_loaded_) {
    parameters_->require_all_loaded("the engine");
    all_loaded_ = true;
  }
  stage(plan, all_logits);
  const SymbolValues& decode_bounds = decode_->program->environment().bounds;
  const bool fits_decode = symbols_[Symbol::tokens] <= decode_bounds[Symbol::tokens] &&
                           symbols_[Symbol::logit_rows] <= decode_bounds[Symbol::logit_rows];
  const Compiled& c = fits_decode ? *decode_ : *prefill_;
  last_ = nullptr;
  const auto set = [&](pipeline::ValueId id, const auto& list) {
    c.program->set_input(id, list.data(), static_cast<int64_t>(list.size() * sizeof(list[0])));
  };
  set(c.token_ids, staging_.token_ids);
  set(c.positions, staging_.positions);
  set(c.query_start, staging_.query_start);
  set(c.kv_length, staging_.kv_length);
  set(c.block_table, staging_.block_table);
  set(c.slots, staging_.slots);
  set(c.logit_rows, staging_.logit_rows);
  set(c.sample_rows, staging_.sample_rows);
  set(c.penalties, staging_.penalties);

  for (const StepSequence& sequence : plan) contents_.truncate(used_blocks(sequence), sequence.cached);
  {
    const StepThreads threads(*device_, fits_decode ? StepKind::few_rows : StepKind::many_rows);
    if (hooks_.has_hooks()) [[unlikely]] {
      const pipeline::StepObserver observer = hooks_.observer(*c.program);
      c.program->run(symbols_, &observer, cancel);
    } else {
      c.program->run(symbols_, nullptr, cancel);
    }
  }
  for (const StepSequence& sequence : plan) contents_.write(used_blocks(sequence), sequence.cached, sequence.tokens);
  last_ = &c;
  output_.output_ids.resize(staging_.logit_rows.size());
  output_.logprobs.resize(staging_.logit_rows.size());
  c.program->read(c.token, output_.output_ids.data());
  c.program->read(c.logprob, output_.logprobs.data());
  return output_;
}

}  // namespace eadem::engine
