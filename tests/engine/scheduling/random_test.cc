// SPDX-License-Identifier: Apache-2.0
//
// Thousands of random schedules give every request the tokens that it would get alone, keep the limits, lose no block
// and let nobody wait for longer than the scheduler states.
#include <map>
#include <random>

#include "tests/engine/scheduling/simulation.h"

namespace eadem::engine::scheduling_test {
namespace {

struct Known {
  GenerationRequest request;
  Ids tokens;
  int64_t last_step = -1;  // by which it must have ended, once it has aged
  bool cancelled = false, ended = false;

  // The steps that it takes at most when it is the first in order.
  int64_t most_steps() const { return std::ssize(request.prompt) + request.max_tokens; }
};

// What all schedules did together: they are worth little if nothing of this happens often.
struct Totals {
  int64_t requests = 0, preemptions = 0, hits = 0, evictions = 0, aged = 0, accepted = 0, rejected = 0, returns = 0;
  int64_t loads = 0, saves = 0, snapshot_evictions = 0, reused = 0, ahead = 0, dropped = 0;
};

class RandomSchedule {
 public:
  RandomSchedule(uint32_t seed, Totals& totals)
      : random_(seed), limits_(random_limits(seed)), simulation_(limits_), totals_(totals), arrivals_(below(15)) {
    simulation_.runs_ahead = below(2) == 0;
    conversation_ = ids(1 + below(std::min<int64_t>(5, limits_.max_sequence_length)));
  }

  void run() {
    while (arrivals_ > 0 || !simulation_.scheduler.is_idle() || simulation_.scheduler.has_ahead()) {
      const bool is_ahead = simulation_.scheduler.has_ahead();
      if (arrivals_ > 0 && below(3) == 0) arrive();
      if (!requests_.empty() && below(10) == 0) cancel();
      if (limits_.max_draft_tokens > 0 && below(4) > 0) propose();
      if (below(8) == 0 && gives_up_ && !is_ahead)
        simulation_.scheduler.plan(simulation_.cache);  // of a step that is abandoned
      if (below(50) == 0 && !is_ahead) simulation_.cache.begin_epoch();
      take_events();
      check_snapshots();
      note_bounds();
      if (testing::Test::HasFailure()) return;
    }
    check_tokens();
    check_blocks();
    const CacheCounters counters = simulation_.scheduler.counters();
    totals_.requests += std::ssize(requests_);
    totals_.preemptions += counters.preemptions;
    totals_.hits += counters.hits;
    totals_.evictions += counters.evictions;
    totals_.returns += simulation_.num_returns;
    totals_.ahead += simulation_.num_ahead;
    totals_.loads += simulation_.num_loads;
    totals_.saves += simulation_.num_saves;
    totals_.snapshot_evictions += simulation_.scheduler.cache().snapshots().num_evicted();
    if (limits_.num_slots > 0) totals_.reused += simulation_.scheduler.reused_tokens();
    totals_.accepted += simulation_.scheduler.accepted_tokens();
    totals_.rejected += simulation_.scheduler.proposed_tokens() - simulation_.scheduler.accepted_tokens();
  }

 private:
  int64_t below(int64_t count) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(count)); }

  SchedulerLimits random_limits(uint32_t seed) {
    SchedulerLimits limits = small_limits();
    limits.max_batch_size = 1 + below(4);
    limits.max_num_batched_tokens = limits.max_batch_size + below(12);
    limits.block_size = 1 + below(6);
    limits.num_blocks = 1 + below(30);
    limits.max_sequence_length = std::min<int64_t>(limits.num_blocks * limits.block_size, 1 + below(40));
    limits.ageing_steps = 1 + below(60);
    limits.prefix_caching = seed % 2 == 0;
    limits.max_draft_tokens = std::max<int64_t>(0, below(9) - 3);
    for (int64_t window = 1 + below(4); !limits.prefix_caching && window < 20; window += 1 + below(10))
      limits.windows.push_back(
          {window, std::min(limits.num_blocks, window_blocks(window, limits.block_size, limits.max_batch_size,
                                                             limits.max_num_batched_tokens))});
    if (seed % 4 == 1) limits.num_slots = limits.max_batch_size;
    if (seed % 8 >= 6) {  // with prefixes and snapshots
      limits.num_slots = limits.max_batch_size;
      limits.num_snapshots = 1 + below(8);
      limits.snapshot_distance = 1 + below(3 * limits.block_size);
      limits.prefix_caching = true;
      limits.windows.clear();
    }
    // States per sequence begin again after a step that is given up, so that the bound does not hold.
    gives_up_ = limits.num_slots == 0 || below(2) == 0;
    return limits;
  }

  // Most prompts begin as others do.
  void arrive() {
    --arrivals_;
    GenerationRequest request{
        .prompt = ids(1 + below(limits_.max_sequence_length), static_cast<int32_t>(100 * below(3))),
        .max_tokens = 1 + below(20),
        .keep = below(4) == 0,
        .priority = below(3)};
    if (below(3) == 0) request.prompt[static_cast<size_t>(below(std::ssize(request.prompt)))] = 999;
    if (request.keep && std::ssize(conversation_) <= limits_.max_sequence_length) request.prompt = conversation_;
    if (below(4) == 0) request.cache_salt = "another";
    const RequestId id = simulation_.scheduler.add(request);
    arrived_in_[id] = simulation_.steps;
    requests_[id].request = std::move(request);
  }

  // Proposes what the requests will get, up to a wrong token, or more than that.
  void propose() {
    std::vector<std::pair<RequestId, Ids>> proposals;
    for (const Draftable& each : simulation_.scheduler.draftable()) {
      EXPECT_LE(each.most, limits_.max_draft_tokens);
      Ids drafts = tokens_alone({each.tokens.begin(), each.tokens.end()}, below(8));
      if (!drafts.empty() && below(2) == 0) drafts[static_cast<size_t>(below(std::ssize(drafts)))] = kVocab - 1;
      proposals.emplace_back(each.id, std::move(drafts));
    }
    for (const auto& [id, drafts] : proposals) simulation_.scheduler.propose(id, drafts);
  }

  void cancel() {
    auto victim = requests_.begin();
    std::advance(victim, below(std::ssize(requests_)));
    simulation_.scheduler.end(victim->first, RequestState::cancelled);
    const auto planned = simulation_.scheduler.has_ahead() && !victim->second.ended && !victim->second.cancelled;
    totals_.dropped += planned ? 1 : 0;
    victim->second.cancelled = true;
  }

  void take_events() {
    for (const StepEvent& event : simulation_.step()) {
      Known& known = requests_.at(event.id);
      EXPECT_FALSE(known.cancelled || known.ended) << "an event after the end";
      if (event.sampled) known.tokens.push_back(event.token);
      known.ended = event.state == RequestState::finished;
      if (known.ended && known.request.keep) {
        conversation_ = known.request.prompt;
        conversation_.insert(conversation_.end(), known.tokens.begin(), known.tokens.end());
      }
    }
  }

  // The bound that the scheduler's header states.
  void note_bounds() {
    if (limits_.num_slots > 0 && gives_up_) return;
    int64_t earlier = 0;
    for (auto& [id, known] : requests_) {
      if (known.ended || known.cancelled) continue;
      earlier += known.most_steps();
      if (known.last_step < 0 && simulation_.steps >= arrived_in_[id] + limits_.ageing_steps) {
        known.last_step = arrived_in_[id] + limits_.ageing_steps + earlier;
        ++totals_.aged;
      }
      if (known.last_step >= 0) {
        EXPECT_LT(simulation_.steps, known.last_step) << "request " << id;
      }
    }
  }

  // Between steps nobody but a request that starts has a snapshot, each has one at most, and nobody else has a slot.
  void check_snapshots() {
    const Scheduler& scheduler = simulation_.scheduler;
    int64_t references = 0;
    for (int32_t slot = 0; slot < limits_.num_snapshots; ++slot)
      references += scheduler.cache().snapshots().references(slot);
    EXPECT_LE(references, scheduler.count(RequestState::prefilling));
    EXPECT_LE(scheduler.cache().snapshots().num_held(), limits_.num_snapshots);
  }

  void check_tokens() {
    for (const auto& [id, known] : requests_) {
      const int64_t room = limits_.max_sequence_length - std::ssize(known.request.prompt) + 1;
      const int64_t most = std::min(known.request.max_tokens, room);
      if (!known.cancelled) {
        EXPECT_EQ(std::ssize(known.tokens), most) << "request " << id;
      }
      EXPECT_EQ(known.tokens, tokens_alone(known.request.prompt, std::ssize(known.tokens))) << "request " << id;
    }
  }

  void check_blocks() {
    Scheduler& scheduler = simulation_.scheduler;
    // A request of the whole cache takes the room of a kept sequence, too.
    const RequestId all = scheduler.add({.prompt = ids(limits_.max_sequence_length), .max_tokens = 1});
    scheduler.plan(simulation_.cache);
    EXPECT_EQ(scheduler.state(all), RequestState::prefilling);
    scheduler.end(all, RequestState::cancelled);
    for (int32_t slot = 0; slot < limits_.num_snapshots; ++slot)
      EXPECT_EQ(scheduler.cache().snapshots().references(slot), 0);
    // A kept sequence may hold its tokens, and its window.
    const CacheManager& cache = scheduler.cache();
    int64_t taken = 0;
    for (int32_t block = 0; block < limits_.num_blocks; ++block) {
      EXPECT_LE(cache.references(block), 1);
      taken += cache.references(block);
    }
    EXPECT_EQ(taken, limits_.num_blocks - cache.num_free());
    EXPECT_LE(taken, cache.blocks_for(limits_.max_sequence_length));
    for (size_t g = 0; g < limits_.windows.size(); ++g) {
      const auto& [window, num_blocks] = limits_.windows[g];
      const int64_t held = (window + limits_.block_size - 2) / limits_.block_size + 1;
      EXPECT_GE(cache.num_free(g), num_blocks - held);
    }
  }

  std::mt19937 random_;
  bool gives_up_ = true;  // steps
  SchedulerLimits limits_;
  Simulation simulation_;
  Totals& totals_;
  std::map<RequestId, Known> requests_;
  std::map<RequestId, int64_t> arrived_in_;
  Ids conversation_;
  int64_t arrivals_;
};

// Requests arrive, overtake each other, are preempted and cancelled, and keep conversations at random.
TEST(RandomSchedules, GiveEveryRequestItsTokens) {
  Totals totals;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(seed);
    RandomSchedule(seed, totals).run();
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(totals.requests, 20000);
  EXPECT_GT(totals.preemptions, 2000);
  EXPECT_GT(totals.hits, 2000);
  EXPECT_GT(totals.evictions, 2000);
  EXPECT_GT(totals.aged, 2000);
  EXPECT_GT(totals.accepted, 5000);
  EXPECT_GT(totals.rejected, 5000);
  EXPECT_GT(totals.returns, 500);
  EXPECT_GT(totals.ahead, 5000);
  EXPECT_GT(totals.dropped, 200);
  EXPECT_GT(totals.loads, 500);
  EXPECT_GT(totals.saves, 5000);
  EXPECT_GT(totals.snapshot_evictions, 1000);
  EXPECT_GT(totals.reused, 2000);
}

}  // namespace
}  // namespace eadem::engine::scheduling_test
