// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/scheduler.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace eadem::engine {

Scheduler::Scheduler(InferEngine& engine) : engine_(engine), allocator_(engine.cache_spec().num_blocks) {
  running_.reserve(static_cast<size_t>(engine.max_batch_size()));
}

int64_t Scheduler::blocks_for(int64_t tokens) const {
  const int64_t block_size = engine_.cache_spec().block_size;
  return (tokens + block_size - 1) / block_size;
}

Scheduler::RequestId Scheduler::add(Request request) {
  const auto length = static_cast<int64_t>(request.prompt.size());
  if (length == 0) throw InvalidArgument("the prompt has no tokens; at least one is needed");
  const int64_t limit = engine_.max_sequence_length();
  if (length > limit)
    throw InvalidArgument("the prompt has {} tokens; the context holds {} (model: {})", length, limit,
                          engine_.model().info().max_positions);
  for (size_t i = 0; i < request.prompt.size(); ++i)
    if (request.prompt[i] < 0 || request.prompt[i] >= engine_.model().info().vocab)
      throw InvalidArgument("token {} of the prompt is {}; the vocabulary has {}", i, request.prompt[i],
                            engine_.model().info().vocab);
  EADEM_CHECK(request.max_tokens >= 1, "max_tokens {}", request.max_tokens);
  request.max_tokens = std::min(request.max_tokens, limit);  // the most that a sequence can get; keeps the sums small
  Sequence sequence;
  sequence.id = next_id_++;
  // The last sampled token is not fed back, so it needs no place in the cache.
  const int64_t most = std::min(limit, length + request.max_tokens - 1);
  sequence.tokens.reserve(static_cast<size_t>(most) + 1);
  sequence.tokens = request.prompt;
  sequence.blocks.reserve(static_cast<size_t>(blocks_for(most)));
  sequence.request = std::move(request);
  sequence.request.sampling.prompt_length = static_cast<int32_t>(length);
  waiting_.push_back(std::move(sequence));
  return waiting_.back().id;
}

void Scheduler::cancel(RequestId id) {
  std::erase_if(waiting_, [&](const Sequence& s) { return s.id == id; });
  for (size_t i = 0; i < running_.size(); ++i)
    if (running_[i].id == id) {
      finish(i);
      return;
    }
}

void Scheduler::drop_kept() {
  allocator_.give_back(kept_);
  kept_.clear();
}

void Scheduler::finish(size_t index) {
  Sequence& s = running_[index];
  if (s.request.keep) {
    drop_kept();
    kept_.swap(s.blocks);
    // Nothing is cached in the blocks that were reserved for tokens that never came.
    const auto used = static_cast<size_t>(blocks_for(s.cached));
    allocator_.give_back(std::span(kept_).subspan(used));
    kept_.resize(used);
  }
  allocator_.give_back(s.blocks);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
}

void Scheduler::admit() {
  while (!waiting_.empty() && num_running() < engine_.max_batch_size()) {
    Sequence& next = waiting_.front();
    const int64_t most = std::min(engine_.max_sequence_length(),
                                  static_cast<int64_t>(next.request.prompt.size()) + next.request.max_tokens - 1);
    const int64_t needed = blocks_for(most);
    const int64_t own = next.request.keep ? std::min(needed, std::ssize(kept_)) : 0;
    if (needed - own > allocator_.num_free()) {
      if (next.request.keep || kept_.empty()) return;  // first come, first served
      drop_kept();
      continue;
    }
    start(next, needed);
    running_.push_back(std::move(next));
    waiting_.pop_front();
  }
}

void Scheduler::start(Sequence& sequence, int64_t num_blocks) {
  if (sequence.request.keep) {
    const auto own = std::min(static_cast<size_t>(num_blocks), kept_.size());
    sequence.blocks.assign(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(own));
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(own));
    drop_kept();
    // The logits after the last token of the prompt are needed, so that token is always computed.
    const std::span prompt(sequence.request.prompt);
    sequence.cached = engine_.cached_prefix(sequence.blocks, prompt.first(prompt.size() - 1));
    reused_tokens_ += sequence.cached;
  }
  while (std::ssize(sequence.blocks) < num_blocks) sequence.blocks.push_back(*allocator_.take());
}

void Scheduler::compose() {
  input_.input_ids.clear();
  input_.input_lengths.clear();
  input_.cache_lengths.clear();
  input_.sampling.clear();
  input_.unfinished.clear();
  in_step_.clear();
  int64_t budget = std::max(engine_.options().max_step_tokens, engine_.max_batch_size());
  const auto add = [&](size_t index) {
    const Sequence& s = running_[index];
    const int64_t count = std::min(budget, s.pending());
    budget -= count;
    input_.input_ids.insert(input_.input_ids.end(), s.tokens.begin() + s.cached, s.tokens.begin() + s.cached + count);
    input_.input_lengths.push_back(static_cast<int32_t>(count));
    input_.cache_lengths.push_back(static_cast<int32_t>(s.cached));
    input_.sampling.push_back(s.request.sampling);
    input_.unfinished.push_back(count < s.pending() ? 1 : 0);
    if (input_.block_tables.size() <= in_step_.size()) input_.block_tables.emplace_back();
    input_.block_tables[in_step_.size()].assign(s.blocks.begin(), s.blocks.end());
    in_step_.push_back(index);
  };
  // Decoding sequences go first, so that a long prompt beside them does not make them wait.
  for (bool decoding : {true, false})
    for (size_t i = 0; i < running_.size(); ++i)
      if (running_[i].decodes() == decoding && budget > 0) add(i);
  input_.block_tables.resize(in_step_.size());
}

bool Scheduler::step(const OnToken& on_token, const std::atomic<bool>* cancel) {
  admit();
  if (running_.empty()) return false;
  compose();
  const InferEngine::Output& output = engine_.forward(input_, cancel);
  ended_.clear();
  std::exception_ptr failure;
  for (size_t i = 0, row = 0; i < in_step_.size(); ++i) {
    Sequence& s = running_[in_step_[i]];
    const int64_t count = input_.input_lengths[i];
    (s.decodes() ? decode_tokens_ : prompt_tokens_) += count;
    s.cached += count;
    if (input_.unfinished[i] != 0) continue;
    const int32_t token = output.output_ids[row];
    const float logprob = output.logprobs[row];
    ++row;
    ++s.drawn;
    const bool full = static_cast<int64_t>(s.tokens.size()) >= engine_.max_sequence_length();
    const bool last = token < 0 || s.drawn >= s.request.max_tokens || full;
    bool wants_more = false;
    try {
      wants_more = on_token({s.id, token, logprob, last});
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
    if (last || !wants_more)
      ended_.push_back(s.id);
    else
      s.tokens.push_back(token);
  }
  for (RequestId id : ended_) this->cancel(id);
  if (failure) std::rethrow_exception(failure);
  return !running_.empty() || !waiting_.empty();
}

}  // namespace eadem::engine
