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

bool is_unfinished(const InferEngine::Input& input, size_t sequence) {
  return !input.unfinished.empty() && input.unfinished[sequence] != 0;
}

}  // namespace

// --- Checks. They change nothing except the engine's record of which step uses which block.

void InferEngine::check(const Input& input) {
  check_sizes(input);
  contents_.begin_step();
  int64_t first = 0;
  for (size_t s = 0; s < input.input_lengths.size(); ++s) {
    check_sequence(input, s, first);
    contents_.check(static_cast<int64_t>(s), blocks_of(input, s), input.cache_lengths[s], input.input_lengths[s]);
    first += input.input_lengths[s];
  }
  const auto tokens = std::ssize(input.input_ids);
  if (first != tokens) throw InvalidArgument("input_lengths add up to {}; there are {} input_ids", first, tokens);
  check_sampling(input);
}

void InferEngine::check_sizes(const Input& input) const {
  const SymbolValues& bounds = prefill_->program->environment().bounds;
  const auto batch = std::ssize(input.input_lengths), tokens = std::ssize(input.input_ids);
  if (batch < 1 || batch > max_batch_)
    throw InvalidArgument("the step has {} sequences; expected 1 to {}", batch, max_batch_);
  if (tokens > bounds[Symbol::tokens])
    throw InvalidArgument("the step has {} tokens; at most {} fit (max_step_tokens)", tokens, bounds[Symbol::tokens]);
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
  const int64_t rows = input.all_logits ? tokens : batch;
  if (rows > bounds[Symbol::logit_rows])
    throw InvalidArgument(
        "the step asks for {} rows of logits; at most {} fit: set max_logit_rows of the engine to {} or more", rows,
        bounds[Symbol::logit_rows], rows);
}

// Checks sequence `s`, whose new tokens begin at index `first` of the packed tokens.
void InferEngine::check_sequence(const Input& input, size_t s, int64_t first) const {
  const int64_t length = input.input_lengths[s], cached = input.cache_lengths[s];
  const auto tokens = std::ssize(input.input_ids);
  if (length < 1) throw InvalidArgument("sequence {} has {} new tokens; expected at least 1", s, length);
  if (cached < 0) throw InvalidArgument("sequence {} has {} cached tokens", s, cached);
  if (cached + length > max_length_)
    throw InvalidArgument("sequence {} would have {} tokens ({} cached + {} new); the cache holds {}", s,
                          cached + length, cached, length, max_length_);
  if (first + length > tokens)
    throw InvalidArgument("input_lengths add up to more than the {} input_ids at sequence {}", tokens, s);
  if (!input.block_tables.empty()) {
    const std::vector<int32_t>& blocks = input.block_tables[s];
    const int64_t needed = (cached + length + cache_.block_size - 1) / cache_.block_size;
    const int64_t most = prefill_->program->environment().bounds[Symbol::max_blocks];
    if (std::ssize(blocks) < needed || std::ssize(blocks) > most)
      throw InvalidArgument("sequence {} has {} blocks; {} tokens need {}, at most {} fit", s, blocks.size(),
                            cached + length, needed, most);
    for (int32_t block : blocks)
      if (block < 0 || block >= cache_.num_blocks)
        throw InvalidArgument("sequence {} names block {}; there are {}", s, block, cache_.num_blocks);
  }
  const std::span<const int32_t> table = blocks_of(input, s);
  for (int64_t t = first; t < first + length; ++t) {
    const auto at = static_cast<size_t>(t);
    const int64_t position = cached + t - first;
    if (input.input_ids[at] < 0 || input.input_ids[at] >= model_->info().vocab)
      throw InvalidArgument("token {} of sequence {} is {}; the vocabulary has {}", t - first, s, input.input_ids[at],
                            model_->info().vocab);
    if (!input.position_ids.empty() && input.position_ids[at] != position)
      throw InvalidArgument("position {} of token {} of sequence {}; its place in the cache is {}",
                            input.position_ids[at], t - first, s, position);
    if (!input.slot_mapping.empty()) {
      const int64_t block = table[static_cast<size_t>(position / cache_.block_size)];
      const int64_t expected = block * cache_.block_size + position % cache_.block_size;
      if (input.slot_mapping[at] != expected)
        throw InvalidArgument("slot {} of token {} of sequence {}; its block table says {}", input.slot_mapping[at],
                              t - first, s, expected);
    }
  }
}

void InferEngine::check_sampling(const Input& input) const {
  int64_t penalized = 0;
  for (size_t s = 0; s < input.sampling.size(); ++s) {
    const SamplingInput& p = input.sampling[s];
    try {
      check_range(p);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("sequence {}: {}", s, error.what());
    }
    if (p.has_penalties())
      penalized += std::min<int64_t>(input.cache_lengths[s] + input.input_lengths[s], model_->info().vocab);
  }
  const int64_t most = prefill_->program->environment().bounds[Symbol::penalties];
  if (penalized > most)  // sequences that share blocks
    throw InvalidArgument("the step's penalties look at {} tokens; at most the cache's {} fit", penalized, most);
}

std::span<const int32_t> InferEngine::blocks_of(const Input& input, size_t sequence) const {
  if (input.block_tables.empty()) return std::span(identity_).subspan(sequence, 1);
  const int64_t end = int64_t{input.cache_lengths[sequence]} + input.input_lengths[sequence];
  return std::span(input.block_tables[sequence])
      .first(static_cast<size_t>((end + cache_.block_size - 1) / cache_.block_size));
}

// --- Layout.

void InferEngine::stage(const Input& input) {
  Staging& s = staging_;
  for (auto* list : {&s.positions, &s.query_start, &s.kv_length, &s.block_table, &s.logit_rows, &s.penalties})
    list->clear();
  s.slots.clear();
  s.sample_rows.clear();
  const size_t batch = input.input_lengths.size();
  size_t widest = 1;
  for (size_t i = 0; i < batch; ++i) widest = std::max(widest, blocks_of(input, i).size());
  s.query_start.push_back(0);
  for (size_t i = 0; i < batch; ++i) {
    const int32_t first = s.query_start.back(), length = input.input_lengths[i], cached = input.cache_lengths[i];
    const std::span<const int32_t> blocks = blocks_of(input, i);
    for (size_t b = 0; b < widest; ++b) s.block_table.push_back(b < blocks.size() ? blocks[b] : 0);
    for (int64_t position = cached; position < cached + length; ++position) {
      s.positions.push_back(static_cast<int32_t>(position));
      s.slots.push_back(blocks[static_cast<size_t>(position / cache_.block_size)] * cache_.block_size +
                        position % cache_.block_size);
    }
    s.query_start.push_back(first + length);
    s.kv_length.push_back(cached + length);
    if (is_unfinished(input, i)) continue;
    const SamplingInput sampling = input.sampling.empty() ? SamplingInput{} : input.sampling[i];
    for (int32_t t = input.all_logits ? 0 : length - 1; t < length; ++t) {
      s.logit_rows.push_back(first + t);
      s.sample_rows.push_back({.settings = sampling, .position = cached + t + 1});
    }
    if (sampling.has_penalties())
      stage_penalties(blocks, cached,
                      std::span(input.input_ids).subspan(static_cast<size_t>(first), static_cast<size_t>(length)),
                      s.sample_rows.back());
  }
  symbols_[Symbol::tokens] = std::ssize(input.input_ids);
  symbols_[Symbol::sequences] = static_cast<int64_t>(batch);
  symbols_[Symbol::logit_rows] = std::ssize(s.logit_rows);
  symbols_[Symbol::max_blocks] = static_cast<int64_t>(widest);
  symbols_[Symbol::penalties] = std::ssize(s.penalties) / 2;
}

// Lists the distinct tokens of a sequence with the number of times that each was generated.
void InferEngine::stage_penalties(std::span<const int32_t> blocks, int64_t cached, std::span<const int32_t> tokens,
                                  SampleRow& row) {
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
  for (int64_t position = 0; position < cached; ++position) count(contents_.token(blocks, position), position);
  for (size_t i = 0; i < tokens.size(); ++i) count(tokens[i], cached + static_cast<int64_t>(i));
  row.penalties_end = static_cast<int32_t>(s.penalties.size() / 2);
  for (int32_t pair = row.penalties_begin; pair < row.penalties_end; ++pair)
    s.pair_of_token[static_cast<size_t>(s.penalties[2 * static_cast<size_t>(pair)])] = -1;
}

// --- The step.

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
  set(c.sample_rows, staging_.sample_rows);
  set(c.penalties, staging_.penalties);

  for (size_t i = 0; i < input.input_lengths.size(); ++i)
    contents_.truncate(blocks_of(input, i), input.cache_lengths[i]);
  {
    const StepThreads threads(*device_, fits_decode ? StepKind::few_rows : StepKind::many_rows);
    if (hooks_.has_hooks()) [[unlikely]] {
      const pipeline::StepObserver observer = hooks_.observer(*c.program);
      c.program->run(symbols_, &observer, cancel);
    } else {
      c.program->run(symbols_, nullptr, cancel);
    }
  }
  for (size_t i = 0; i < input.input_lengths.size(); ++i)
    contents_.write(
        blocks_of(input, i), input.cache_lengths[i],
        std::span(input.input_ids)
            .subspan(static_cast<size_t>(staging_.query_start[i]), static_cast<size_t>(input.input_lengths[i])));
  last_ = &c;
  output_.output_ids.resize(staging_.logit_rows.size());
  output_.logprobs.resize(staging_.logit_rows.size());
  c.program->read(c.token, output_.output_ids.data());
  c.program->read(c.logprob, output_.logprobs.data());
  return output_;
}

}  // namespace eadem::engine
