// SPDX-License-Identifier: Apache-2.0
//
// One step of an InferEngine: its input is checked, laid out for the device, and run.
#include <algorithm>

#include "eadem/engine/infer_engine.h"
#include "eadem/engine/sampling_params.h"

namespace eadem::engine {

using modules::CacheLayout;

namespace {

// Tells the device the kind of a step, which chooses its threads, for as long as the step runs.
class StepThreads {
 public:
  StepThreads(Device& device, StepKind kind) : device_(device) { device_.set_step_kind(kind); }
  StepThreads(const StepThreads&) = delete;
  StepThreads& operator=(const StepThreads&) = delete;
  ~StepThreads() { device_.set_step_kind(StepKind::prefill); }

 private:
  Device& device_;
};

// The new tokens and the rows of logits of a step.
void count_rows(std::span<const StepSequence> plan, bool all_logits, int64_t& tokens, int64_t& logit_rows) {
  tokens = logit_rows = 0;
  for (const StepSequence& sequence : plan) {
    tokens += std::ssize(sequence.tokens);
    logit_rows += all_logits ? std::ssize(sequence.tokens) : sequence.num_rows();
  }
}

}  // namespace

// --- An input becomes the sequences of a step.

void InferEngine::check_sizes(const Input& input) const {
  const auto batch = std::ssize(input.input_lengths), tokens = std::ssize(input.input_ids);
  if (batch < 1 || batch > max_batch_size())
    throw InvalidArgument("the step has {} sequences; expected 1 to {}", batch, max_batch_size());
  const auto same = [&](const char* name, size_t size, int64_t expected, bool optional) {
    if ((!optional || size > 0) && static_cast<int64_t>(size) != expected)
      throw InvalidArgument("{} has {} entries; expected {}", name, size, expected);
  };
  same("cache_lengths", input.cache_lengths.size(), batch, false);
  same("position_ids", input.position_ids.size(), tokens, true);
  same("block_tables", input.block_tables.size(), batch,
       cache_spec().layout == CacheLayout::contiguous || !input.slot_mapping.empty());
  same("rows", input.rows.size(), batch, true);
  same("slot_mapping", input.slot_mapping.size(), tokens, true);
  same("sampling", input.sampling.size(), batch, true);
  same("unfinished", input.unfinished.size(), batch, true);
  if (input.all_logits && !input.unfinished.empty())
    throw InvalidArgument("all_logits asks for a row of logits of every token, unfinished for none of some sequences");
}

void InferEngine::make_sequences(const Input& input) {
  sequences_.clear();
  const auto tokens = std::ssize(input.input_ids);
  const Tables& tables = input.slot_mapping.empty() ? input.block_tables : tables_;
  int64_t first = 0;
  for (size_t s = 0; s < input.input_lengths.size(); ++s) {
    const int64_t length = input.input_lengths[s];
    if (length < 1) throw InvalidArgument("sequence {} has {} new tokens; expected at least 1", s, length);
    if (first + length > tokens)
      throw InvalidArgument("input_lengths add up to more than the {} input_ids at sequence {}", tokens, s);
    const auto own = [&](const auto& of_all) {
      return of_all.empty() ? std::span(of_all)
                            : std::span(of_all).subspan(static_cast<size_t>(first), static_cast<size_t>(length));
    };
    if (!input.slot_mapping.empty()) follow_slots(input, s, own(input.slot_mapping));
    sequences_.push_back(
        {.tokens = own(input.input_ids),
         .cached = input.cache_lengths[s],
         .blocks = tables.empty() ? std::span<const int32_t>(identity_).subspan(s, 1) : std::span(tables[s]),
         .windows = window_tables(input, tables, s),
         .state_slot = row_of(input, tables, s),
         .sampling = input.sampling.empty() ? SamplingInput{} : input.sampling[s],
         .samples = input.unfinished.empty() || input.unfinished[s] == 0,
         .positions = own(input.position_ids)});
    first += length;
  }
  if (first != tokens) throw InvalidArgument("input_lengths add up to {}; there are {} input_ids", first, tokens);
}

// Makes the block table of sequence `index`: what the input states of it, and the blocks of the slots of its new
// tokens.
void InferEngine::follow_slots(const Input& input, size_t index, std::span<const int64_t> slots) {
  tables_.resize(std::max(tables_.size(), index + 1));
  std::vector<int32_t>& table = tables_[index];
  table.clear();
  if (!input.block_tables.empty()) table = input.block_tables[index];
  const int64_t size = cache_spec().block_size, num_slots = cache_spec().num_blocks * size;
  for (size_t t = 0; t < slots.size(); ++t) {
    const int64_t place = input.cache_lengths[index] + static_cast<int64_t>(t);
    if (place < 0) throw InvalidArgument("sequence {} has {} cached tokens", index, input.cache_lengths[index]);
    if (slots[t] < 0 || slots[t] >= num_slots)
      throw InvalidArgument("slot {} of token {} of sequence {}; expected 0 to {}", slots[t], t, index, num_slots - 1);
    if (slots[t] % size != place % size)
      throw InvalidArgument(
          "slot {} of token {} of sequence {} is place {} of its block of {}; the token, the {}th of "
          "its sequence counted from 0, has place {}",
          slots[t], t, index, slots[t] % size, size, place, place % size);
    const auto block = static_cast<int32_t>(slots[t] / size);
    const int64_t at = place / size;
    if (at > std::ssize(table))
      throw InvalidArgument("slot {} of token {} of sequence {} lies in its block {}; block_tables name {}", slots[t],
                            t, index, at, table.size());
    if (at == std::ssize(table)) table.push_back(block);
    if (table[static_cast<size_t>(at)] != block)
      throw InvalidArgument("slot {} of token {} of sequence {} lies in block {}; its block table says block {}",
                            slots[t], t, index, block, table[static_cast<size_t>(at)]);
  }
}

// Which of max_batch_size rows keeps the windows and states per sequence of sequence `index`.
int32_t InferEngine::row_of(const Input& input, const Tables& tables, size_t index) const {
  if (cache_spec().layout == CacheLayout::contiguous)
    return tables.empty() || tables[index].empty() ? static_cast<int32_t>(index) : tables[index][0];
  const int32_t row = input.rows.empty() ? static_cast<int32_t>(index) : input.rows[index];
  if (row < 0 || row >= max_batch_size())
    throw InvalidArgument("the row of sequence {} is {}; expected 0 to {}", index, row, max_batch_size() - 1);
  return row;
}

// The tables of the window groups of sequence `index`: its ring, or its own blocks where each has as many.
std::span<const std::vector<int32_t>> InferEngine::window_tables(const Input& input, const Tables& tables,
                                                                 size_t index) {
  if (window_contents_.empty()) return {};
  const int32_t row = row_of(input, tables, index);
  const int64_t cached = input.cache_lengths[index], end = cached + input.input_lengths[index];
  for (size_t g = 0; g < window_contents_.size() && cached >= 0; ++g)
    if (const int64_t needed = window_contents_[g].num_places(cached, end); needed > rings_.length(g))
      throw InvalidArgument(
          "sequence {} has {} new tokens, which with the window of {} take {} blocks; each of {} sequences has {}: "
          "compute fewer at once, or lower max_batch_size",
          index, end - cached, cache_spec().windows[g].window, needed, max_batch_size(), rings_.length(g));
  return rings_.tables(row, tables[index]);
}

// --- Checks. They change nothing except the engine's record of which step uses which block.

void InferEngine::check(Plan plan, bool all_logits) {
  const SymbolValues& bounds = prefill_program().environment().bounds;
  int64_t tokens = 0, rows = 0;
  count_rows(plan, all_logits, tokens, rows);
  if (plan.empty() || std::ssize(plan) > max_batch_size())
    throw InvalidArgument("the step has {} sequences; expected 1 to {}", plan.size(), max_batch_size());
  if (tokens > bounds[Symbol::tokens])
    throw InvalidArgument("the step has {} tokens; at most {} fit (max_num_batched_tokens)", tokens,
                          bounds[Symbol::tokens]);
  if (rows > bounds[Symbol::logit_rows])
    throw InvalidArgument(
        "the step asks for {} rows of logits; at most {} fit: set max_logit_rows of the engine to {} or more, or "
        "draft_tokens for proposed tokens",
        rows, bounds[Symbol::logit_rows], rows);
  contents_.begin_step();
  for (WindowContents& contents : window_contents_) contents.begin_step();
  sequence_states_.begin_step();
  for (size_t s = 0; s < plan.size(); ++s) {
    check_sequence(s, plan[s]);
    if (plan[s].windows.size() != window_contents_.size())
      throw InvalidArgument("sequence {} has tables of {} cache groups with a window; the cache has {}", s,
                            plan[s].windows.size(), window_contents_.size());
    const auto blocks = plan[s].used_blocks(cache_spec().block_size);
    contents_.check(static_cast<int64_t>(s), blocks, plan[s].cached, std::ssize(plan[s].tokens));
    for (size_t g = 0; g < window_contents_.size(); ++g)
      window_contents_[g].check(static_cast<int64_t>(s), blocks, plan[s].windows[g], plan[s].cached,
                                std::ssize(plan[s].tokens));
    if (cache_spec().num_slots > 0)
      sequence_states_.check(static_cast<int64_t>(s), plan[s].state_slot, blocks[0], plan[s].cached,
                             {plan[s].load_snapshot, plan[s].save_snapshot});
  }
  check_sampling(plan);
}

void InferEngine::check_sequence(size_t index, const StepSequence& sequence) const {
  const int64_t length = std::ssize(sequence.tokens), cached = sequence.cached;
  if (length < 1) throw InvalidArgument("sequence {} has {} new tokens; expected at least 1", index, length);
  if (cached < 0) throw InvalidArgument("sequence {} has {} cached tokens", index, cached);
  if (cached + length > max_sequence_length())
    throw InvalidArgument("sequence {} would have {} tokens ({} cached + {} new); the cache holds {}", index,
                          cached + length, cached, length, max_sequence_length());
  const int64_t needed = (cached + length + cache_spec().block_size - 1) / cache_spec().block_size;
  const int64_t most = prefill_program().environment().bounds[Symbol::max_blocks];
  if (std::ssize(sequence.blocks) < needed || std::ssize(sequence.blocks) > most)
    throw InvalidArgument("sequence {} has {} blocks; {} tokens need {}, at most {} fit", index, sequence.blocks.size(),
                          cached + length, needed, most);
  for (int32_t block : sequence.blocks)
    if (block < 0 || block >= cache_spec().num_blocks)
      throw InvalidArgument("sequence {} names block {}; there are {}", index, block, cache_spec().num_blocks);
  if (sequence.drafts != 0) check_drafts(index, sequence);
  if (const std::string reason = sequence.may_return ? why_no_return() : ""; !reason.empty())
    throw Unsupported("sequence {} wants to begin behind {} tokens again: {}", index, cached, reason);
  for (size_t t = 0; t < sequence.positions.size(); ++t)
    if (sequence.positions[t] < 0 || sequence.positions[t] >= model_->info().max_positions)
      throw InvalidArgument("token {} of sequence {} has position {}; the model's context is {} tokens", t, index,
                            sequence.positions[t], model_->info().max_positions);
  if (const int64_t row_bytes = programs_->prefill().layout.hidden_row_bytes();
      std::ssize(sequence.hidden) != length * row_bytes)
    throw InvalidArgument("sequence {} has {} bytes of hidden states for {} new tokens; {} reads {} of each", index,
                          sequence.hidden.size(), length, model_->info().architecture, row_bytes);
  if (sequence.row >= 0) return check_follows(index, sequence);
  for (int64_t t = 0; t < length; ++t)
    if (const int32_t token = sequence.tokens[static_cast<size_t>(t)]; token < 0 || token >= model_->info().vocab)
      throw InvalidArgument("token {} of sequence {} is {}; the vocabulary has {}", t, index, token,
                            model_->info().vocab);
}

// A sequence whose last tokens are proposed.
void InferEngine::check_drafts(size_t index, const StepSequence& sequence) const {
  if (sequence.drafts < 0 || sequence.drafts >= std::ssize(sequence.tokens) || !sequence.samples)
    throw InvalidArgument("sequence {} has {} proposed tokens among {} new ones{}; they follow one that is none", index,
                          sequence.drafts, sequence.tokens.size(), sequence.samples ? "" : ", and does not sample");
}

// A sequence whose token is that of a row of the step before.
void InferEngine::check_follows(size_t index, const StepSequence& sequence) const {
  if (std::ssize(sequence.tokens) != 1)
    throw InvalidArgument("sequence {} takes the token of row {} and has {} new tokens; expected 1", index,
                          sequence.row, sequence.tokens.size());
  if (last_ == nullptr || sequence.row >= last_rows_)
    throw InvalidArgument("sequence {} takes the token of row {}; the step before had {}", index, sequence.row,
                          last_ == nullptr ? 0 : last_rows_);
  if (sequence.sampling.has_penalties() || !sequence.bad_words.empty() || sequence.processor != nullptr)
    throw InvalidArgument("sequence {} takes the token of row {} and has {}, which need its value", index, sequence.row,
                          sequence.sampling.has_penalties() ? "penalties"
                          : sequence.processor == nullptr   ? "bad words"
                                                            : "a processor");
}

// Checks the masks, scored tokens and processor of a sequence. Throws InvalidArgument.
void InferEngine::check_scored(size_t index, const StepSequence& sequence) const {
  const int64_t vocab = model_->info().vocab, words = (vocab + 31) / 32;
  if (!sequence.allowed.empty() && std::ssize(sequence.allowed) != words)
    throw InvalidArgument("sequence {} has a mask of {} words; {} tokens take {}", index, sequence.allowed.size(),
                          vocab, words);
  for (const std::vector<int32_t>& word : sequence.bad_words)
    if (word.size() < 2 || word.back() < 0 || word.back() >= vocab)
      throw InvalidArgument("sequence {} has a bad word of {} tokens that ends in token {}; expected two or more of {}",
                            index, word.size(), word.empty() ? -1 : word.back(), vocab);
  if (sequence.processor != nullptr && sequence.drafts > 0)
    throw InvalidArgument("sequence {} has a processor and {} proposed tokens; expected none", index, sequence.drafts);
  if (sequence.scored.empty()) return;
  const int64_t end = sequence.scored_begin + std::ssize(sequence.scored);
  const int64_t most = std::ssize(sequence.tokens) - sequence.num_sampled_rows();
  if (sequence.scored_begin < 0 || end > most)
    throw InvalidArgument("sequence {} has scored tokens behind its new tokens {} to {}; expected places 0 to {}",
                          index, sequence.scored_begin, end - 1, most - 1);
  for (const int32_t token : sequence.scored)
    if (token < 0 || token >= vocab)
      throw InvalidArgument("sequence {} has scored token {}; the vocabulary has {}", index, token, vocab);
  require_top_logprobs(sequence.scored_top_logprobs);
}

void InferEngine::check_sampling(Plan plan) const {
  int64_t penalized = 0;
  for (size_t s = 0; s < plan.size(); ++s) {
    try {
      check_range(plan[s].sampling);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("sequence {}: {}", s, error.what());
    }
    if (const size_t biases = plan[s].biases.size() + plan[s].bad_words.size(); biases > size_t{kMaxBiases})
      throw InvalidArgument("sequence {} has {} biases; expected at most {}", s, biases, kMaxBiases);
    check_scored(s, plan[s]);
    if (!plan[s].sampling.has_penalties()) continue;
    const int64_t length = plan[s].cached + std::ssize(plan[s].tokens);
    for (int64_t row = 0; row < plan[s].num_sampled_rows(); ++row)
      penalized += std::min<int64_t>(length - row, model_->info().vocab);
  }
  if (penalized > max_penalized_tokens())  // sequences that share blocks
    throw InvalidArgument("the step's penalties look at {} tokens; at most the cache's {} fit", penalized,
                          max_penalized_tokens());
}

// --- The step.

const InferEngine::Output& InferEngine::forward(const Input& input, const std::atomic<bool>* cancel) {
  require_cache();
  check_sizes(input);
  make_sequences(input);
  check(sequences_, input.all_logits);
  require_collected();
  contents_.begin_epoch();
  submit_step(sequences_, input.all_logits, cancel);
  return collect();
}

const InferEngine::Output& InferEngine::forward(Plan plan, const std::atomic<bool>* cancel) {
  require_collected();
  submit(plan, cancel);
  return collect();
}

void InferEngine::require_collected() const {
  if (num_waiting() > 0) throw InvalidArgument("{} submitted steps were not collected", num_waiting());
}

void InferEngine::submit(Plan plan, const std::atomic<bool>* cancel) {
  require_cache();
  if (num_waiting() == kMostSubmitted)
    throw InvalidArgument("{} submitted steps were not collected; no more may wait", kMostSubmitted);
  check(plan, false);
  submit_step(plan, false, cancel);
}

const StepProgram& InferEngine::program_for(Plan plan, bool all_logits, int64_t tokens, int64_t logit_rows) {
  const bool decodes = !all_logits && tokens == std::ssize(plan) && logit_rows == tokens;
  // Hooks see the rows of the step alone.
  const StepProgram* filled_up = decodes && !hooks_.has_hooks() ? programs_->filled_up_program_for(tokens) : nullptr;
  return filled_up != nullptr ? *filled_up : programs_->program_for(tokens, logit_rows);
}

SequenceStates::Preparation InferEngine::state_preparation(const StepSequence& sequence) const {
  return sequence_states_.preparation(sequence.state_slot, sequence.blocks[0], sequence.cached, sequence.may_return,
                                      {sequence.load_snapshot, sequence.save_snapshot});
}

// Forgets the tokens that the step will overwrite: they are lost even if the step does not come to its end.
void InferEngine::before_writing(Plan plan) {
  for (const StepSequence& s : plan) {
    contents_.truncate(s.used_blocks(cache_spec().block_size), s.cached);
    for (size_t g = 0; g < window_contents_.size(); ++g)
      window_contents_[g].truncate(s.windows[g], s.cached, s.cached + std::ssize(s.tokens));
    if (cache_spec().num_slots > 0) sequence_states_.begin(state_preparation(s), s.blocks[0], s.cached);
  }
}

// Records the tokens that the step writes to the cache. Those that only the device knows follow in collect().
void InferEngine::after_writing(Plan plan, InFlight& step) {
  step.unseen.clear();
  for (const StepSequence& s : plan) {
    const auto blocks = s.used_blocks(cache_spec().block_size);
    contents_.write(blocks, s.cached, s.tokens);
    for (size_t g = 0; g < window_contents_.size(); ++g)
      window_contents_[g].write(blocks, s.windows[g], s.cached, s.cached + std::ssize(s.tokens));
    if (s.row >= 0) step.unseen.emplace_back(s.slot(s.cached, cache_spec().block_size), s.row);
    if (cache_spec().num_slots > 0) sequence_states_.end(s.state_slot, blocks[0], s.cached + std::ssize(s.tokens));
  }
}

void InferEngine::submit_step(Plan plan, bool all_logits, const std::atomic<bool>* cancel) {
  if (channel_ != nullptr) {
    if (!hooks_.is_told()) tell_hooks();
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("interrupted");
    cancel = nullptr;  // the ranks would not end the step at the same kernel
  }
  if (!all_loaded_) {
    parameters_->require_all_loaded("the engine");
    all_loaded_ = true;
  }
  int64_t tokens = 0, rows = 0;
  count_rows(plan, all_logits, tokens, rows);
  const StepProgram& program = program_for(plan, all_logits, tokens, rows);
  InFlight& step = in_flight(num_submitted_);
  last_ = nullptr;
  descriptor_->fill(program.layout, plan, all_logits, contents_, program.filled_up);
  if (channel_ != nullptr) tell_step(plan, program);
  descriptor_->upload();
  before_writing(plan);
  collect_processed(plan);
  // In longer steps weights would be packed more than once.
  constexpr int64_t kMostTokensBeforePacking = 256;
  if (parameters_->has_stored() && (stepped_ || tokens > kMostTokensBeforePacking)) parameters_->pack_stored();
  stepped_ = true;
  run_program(program, cancel);

  const HostResults host = host_results(step);
  program.program->read_later(program.token, host.tokens);
  program.program->read_later(program.logprob, host.logprobs);
  step.has_top = std::any_of(plan.begin(), plan.end(), [](const StepSequence& s) {
    return (s.samples && s.sampling.top_logprobs > 0) || (!s.scored.empty() && s.scored_top_logprobs > 0);
  });
  if (step.has_top) {
    program.program->read_later(program.top_token, host.top_tokens);
    program.program->read_later(program.top_logprob, host.top_logprobs);
  }
  step.done->record();
  step.rows = rows;
  after_writing(plan, step);
  if (num_waiting() == 0) fill_in_tokens(step);
  last_ = &program;
  last_tokens_ = tokens;
  last_rows_ = rows;
  ++num_submitted_;
}

// The parts of the memory that a step's results are copied to.
InferEngine::HostResults InferEngine::host_results(InFlight& step) const {
  const int64_t rows = prefill_program().environment().bounds[Symbol::logit_rows];
  HostResults host;
  host.tokens = static_cast<int32_t*>(step.host.data());
  host.logprobs = reinterpret_cast<float*>(host.tokens + rows);
  host.top_tokens = reinterpret_cast<int32_t*>(host.logprobs + rows);
  host.top_logprobs = reinterpret_cast<float*>(host.top_tokens + rows * kernels::kMostTopLogprobs);
  return host;
}

// Lists the rows of logits that have a processor.
void InferEngine::collect_processed(Plan plan) {
  processed_.clear();
  int64_t row = 0;
  for (const StepSequence& sequence : plan) {
    row += sequence.num_rows();
    if (sequence.processor != nullptr && sequence.samples) processed_.emplace_back(row - 1, &sequence);
  }
}

// Calls the processors once the logits are there that are sampled from. They are whole on every rank, and only the
// tokens of rank 0 count.
void InferEngine::process(const StepProgram& program, const pipeline::Node& node, std::span<const TensorView> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (node.outputs[i] != program.sampled_logits) continue;
    for (const auto& [row, sequence] : processed_) {
      const TensorView logits = outputs[i].rows(row, 1);
      const auto vocab = static_cast<size_t>(logits.num_elements());
      if (device_->host_accessible()) {
        (*sequence->processor)(sequence->history, {logits.as<float>(), vocab});
        continue;
      }
      const Tensor host = copy_to_host(*device_, logits);
      (*sequence->processor)(sequence->history, {host.view.as<float>(), vocab});
      device_->copy_from_host(logits.data, host.view.data, host.view.size_bytes());
    }
  }
}

void InferEngine::run_program(const StepProgram& program, const std::atomic<bool>* cancel) {
  const StepThreads threads(*device_, program.kind);
  if (hooks_.has_hooks() || !processed_.empty()) [[unlikely]] {
    pipeline::StepObserver hooks;
    if (hooks_.has_hooks()) hooks = hooks_.observer(*program.program, channel_.get());
    const pipeline::StepObserver observer = [&](const pipeline::Node& node, std::span<const TensorView> inputs,
                                                std::span<const TensorView> outputs) {
      if (!processed_.empty()) process(program, node, outputs);
      if (hooks) hooks(node, inputs, outputs);
    };
    program.program->run(descriptor_->symbols(), &observer, cancel);
    hooks_.rethrow();
  } else {
    program.program->run(descriptor_->symbols(), nullptr, cancel);
  }
}

const InferEngine::Output& InferEngine::collect() {
  if (num_waiting() == 0) throw InvalidArgument("collect: no step was submitted");
  InFlight& step = in_flight(num_collected_++);
  step.done->wait();
  const HostResults host = host_results(step);
  const int64_t top = step.has_top ? step.rows * kernels::kMostTopLogprobs : 0;
  output_.output_ids.assign(host.tokens, host.tokens + step.rows);
  output_.logprobs.assign(host.logprobs, host.logprobs + step.rows);
  output_.top_tokens.assign(host.top_tokens, host.top_tokens + top);
  output_.top_logprobs.assign(host.top_logprobs, host.top_logprobs + top);
  if (num_waiting() > 0) fill_in_tokens(in_flight(num_collected_));
  return output_;
}

void InferEngine::discard_submitted() {
  while (num_waiting() > 0) collect();
}

// Records the tokens that a step took from the step before, whose output has arrived.
void InferEngine::fill_in_tokens(const InFlight& step) {
  for (const auto& [slot, row] : step.unseen) contents_.set_token(slot, output_.output_ids[static_cast<size_t>(row)]);
}

}  // namespace eadem::engine
