// SPDX-License-Identifier: Apache-2.0
//
// A scheduler and a cache without a model, on which steps run as an engine runs them. The next token is a hash of all
// tokens before it, read from the cache that the plan names: a sequence whose cache is wrong gets other tokens. A state
// per sequence is such a hash, too, with a second copy, and with snapshots.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/engine/cache/cache_plan.h"
#include "eadem/engine/scheduler.h"

namespace eadem::engine::scheduling_test {

using Ids = std::vector<int32_t>;

inline constexpr int64_t kVocab = 1000;

inline Ids ids(int64_t count, int32_t first = 0) {
  Ids result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

inline int32_t next_token(uint64_t hash) { return static_cast<int32_t>(hash % kVocab); }
inline uint64_t hash_with(uint64_t hash, int32_t token) {
  return (hash ^ static_cast<uint64_t>(token)) * 0x9e3779b97f4a7c15u;
}

// What a request gets that has the engine to itself.
inline Ids tokens_alone(const Ids& prompt, int64_t count) {
  uint64_t hash = 1;
  for (int32_t token : prompt) hash = hash_with(hash, token);
  Ids result;
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(next_token(hash));
    hash = hash_with(hash, result.back());
  }
  return result;
}

class Simulation {
 public:
  explicit Simulation(const SchedulerLimits& limits)
      : limits(limits), scheduler(limits), cache(limits.num_blocks, limits.block_size) {
    for (const modules::WindowGroup& group : limits.windows) windows.emplace_back(group.num_blocks, limits.block_size);
    states.resize(static_cast<size_t>(limits.num_slots));
    snapshots.resize(static_cast<size_t>(limits.num_snapshots));
  }

  // Runs one step, and the next one if it may be run before this one is committed. Returns the events; none when no
  // request is there.
  std::span<const StepEvent> step() {
    const Ids tokens = scheduler.follow_ahead() ? std::exchange(ahead_, {}) : run(scheduler.plan(cache));
    const std::vector<StepSequence> planned = last;
    ++steps;
    if (runs_ahead)
      if (const auto plan = scheduler.plan_ahead(); !plan.empty()) {
        ahead_ = run(plan, tokens);
        ++num_ahead;
      }
    last = planned;
    return scheduler.commit(tokens, std::vector<float>(tokens.size(), -1.0f));
  }

  // Runs steps until the scheduler is idle, and returns the tokens of each request.
  std::map<RequestId, Ids> run_all() {
    std::map<RequestId, Ids> result;
    while (!scheduler.is_idle() || scheduler.has_ahead())
      for (const StepEvent& event : step())
        if (event.sampled) result[event.id].push_back(event.token);
    return result;
  }

  SchedulerLimits limits;
  Scheduler scheduler;
  bool runs_ahead = false;
  int64_t num_ahead = 0;           // steps that ran before the one before was committed
  int64_t steps = 0;               // that were committed
  std::vector<StepSequence> last;  // of them, as far as their requests are there
  CacheContents cache;
  std::vector<CacheContents> windows;  // of the groups with a window
  struct State {
    int64_t tokens = 0;
    uint64_t hash = 1;
  };
  std::vector<std::pair<State, State>> states;  // of each slot, and the kept one
  std::vector<State> snapshots;
  int64_t num_returns = 0;               // to a kept state
  int64_t num_loads = 0, num_saves = 0;  // of snapshots

 private:
  // Returns what the step samples. Its rows are those of `before`, the tokens of the step before.
  Ids run(std::span<const StepSequence> plan, const Ids& before = {}) {
    last.assign(plan.begin(), plan.end());
    Ids fed;
    fed.reserve(plan.size());
    for (StepSequence& s : last)
      if (s.row >= 0) {
        fed.push_back(before.at(static_cast<size_t>(s.row)));
        s.tokens = std::span(&fed.back(), 1);
      }
    check(last);
    Ids sampled;
    for (const StepSequence& s : last) {
      write(s);
      for (int64_t row = s.num_rows(); row > 0; --row)
        sampled.push_back(next_token(hash_of(s, s.cached + std::ssize(s.tokens) - row + 1)));
    }
    for (StepSequence& s : last)
      if (s.row >= 0) s.tokens = {};  // `fed` ends here
    return sampled;
  }

  std::span<const int32_t> used(const StepSequence& s) const {
    const int64_t end = s.cached + std::ssize(s.tokens);
    return s.blocks.first(static_cast<size_t>((end + limits.block_size - 1) / limits.block_size));
  }

  // Limits are kept, and no block is used twice or read before it was written (CacheContents::check throws).
  void check(std::span<const StepSequence> plan) {
    EXPECT_LE(std::ssize(plan), limits.max_batch_size);
    int64_t tokens = 0, drafts = 0;
    cache.begin_step();
    for (size_t i = 0; i < plan.size(); ++i) {
      tokens += std::ssize(plan[i].tokens);
      drafts += plan[i].drafts;
      EXPECT_TRUE(plan[i].drafts == 0 || plan[i].drafts + 1 == std::ssize(plan[i].tokens) ||
                  (limits.num_slots > 0 && plan[i].drafts + 1 < std::ssize(plan[i].tokens)));
      EXPECT_EQ(plan[i].may_return, plan[i].drafts > 0 && limits.num_slots > 0);
      EXPECT_LE(plan[i].cached + std::ssize(plan[i].tokens), limits.max_sequence_length);
      check_snapshots(plan, i);
      // Nobody writes to a block with a name, or to one that others have.
      const auto first = static_cast<size_t>(plan[i].cached / limits.block_size);
      for (const int32_t block : used(plan[i]).subspan(first)) {
        EXPECT_FALSE(scheduler.cache().is_named(block)) << "block " << block;
        EXPECT_EQ(scheduler.cache().references(block), 1) << "block " << block;
      }
      cache.check(static_cast<int64_t>(i), used(plan[i]), plan[i].cached, std::ssize(plan[i].tokens));
    }
    EXPECT_LE(tokens, limits.max_num_batched_tokens);
    EXPECT_LE(drafts, limits.max_draft_tokens);
    EXPECT_TRUE(drafts == 0 || scheduler.count(RequestState::prefilling) == 0);
    EXPECT_EQ(plan.empty(), scheduler.is_idle());
  }

  // Nobody else saves to what a sequence saves or loads, and both have a reference until the step was committed.
  void check_snapshots(std::span<const StepSequence> plan, size_t index) {
    const auto [load, save] = std::pair(plan[index].load_snapshot, plan[index].save_snapshot);
    if (load >= 0) {
      EXPECT_GT(scheduler.cache().snapshots().references(load), 0);
    }
    if (save < 0) return;
    EXPECT_LT(load, 0) << "a snapshot of what is one";
    EXPECT_EQ(plan[index].cached % limits.block_size, 0);
    EXPECT_GT(scheduler.cache().snapshots().references(save), 0);
    for (size_t other = 0; other < plan.size(); ++other) {
      EXPECT_TRUE(other == index || plan[other].save_snapshot != save) << "snapshot " << save << " is saved twice";
      EXPECT_TRUE(other > index || plan[other].load_snapshot != save) << "snapshot " << save << " has been loaded";
    }
  }

  void write(const StepSequence& s) {
    cache.truncate(used(s), s.cached);
    cache.write(used(s), s.cached, s.tokens);
    for (size_t g = 0; g < windows.size(); ++g) {
      windows[g].write(s.windows[g], s.cached, s.tokens);
      // Every token that the step reads is there.
      const int64_t end = s.cached + std::ssize(s.tokens);
      for (int64_t at = std::max<int64_t>(0, s.cached - limits.windows[g].window + 1); at < end; ++at) {
        if (s.windows[g][static_cast<size_t>(at / limits.block_size)] == kNoBlock) {
          ADD_FAILURE() << "no block for position " << at;
        } else {
          EXPECT_EQ(windows[g].token(s.windows[g], at), cache.token(used(s), at)) << "position " << at;
        }
      }
    }
    if (limits.num_slots > 0) write_state(s);
  }

  // The state is that of the tokens before the step, or that was kept, and becomes that of all tokens.
  void write_state(const StepSequence& s) {
    auto& [state, kept] = states.at(static_cast<size_t>(s.state_slot));
    if (s.load_snapshot >= 0) {
      state = snapshots.at(static_cast<size_t>(s.load_snapshot));
      kept = {};
      EXPECT_EQ(state.tokens, s.cached) << "of snapshot " << s.load_snapshot;
      EXPECT_EQ(state.hash, hash_of(s, s.cached)) << "of snapshot " << s.load_snapshot;
      ++num_loads;
    } else if (s.cached == 0) {
      state = kept = {};
    } else if (state.tokens != s.cached) {
      EXPECT_EQ(kept.tokens, s.cached) << "the state stands behind " << state.tokens << " tokens";
      state = kept;
      ++num_returns;
    }
    if (s.may_return) kept = state;
    if (s.save_snapshot >= 0) {
      snapshots.at(static_cast<size_t>(s.save_snapshot)) = state;
      ++num_saves;
    }
    for (const int32_t token : s.tokens) state.hash = hash_with(state.hash, token);
    state.tokens += std::ssize(s.tokens);
    EXPECT_EQ(state.hash, hash_of(s, state.tokens));
  }

  // Of the sequence's first `count` tokens, as the cache holds them.
  uint64_t hash_of(const StepSequence& s, int64_t count) const {
    uint64_t hash = 1;
    for (int64_t position = 0; position < count; ++position) hash = hash_with(hash, cache.token(used(s), position));
    return hash;
  }

  Ids ahead_;  // what the step samples that runs ahead
};

inline SchedulerLimits small_limits() {
  return {.max_batch_size = 3,
          .max_num_batched_tokens = 8,
          .max_sequence_length = 32,
          .num_blocks = 16,
          .block_size = 4,
          .vocab = kVocab,
          .model_context = 64};
}

}  // namespace eadem::engine::scheduling_test
