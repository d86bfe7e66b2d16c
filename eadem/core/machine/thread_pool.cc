// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/machine/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <set>
#include <system_error>
#include <thread>

#include "eadem/core/error.h"

namespace eadem {

namespace {

using Clock = std::chrono::steady_clock;

// Longer than the gap between the regions of a decode step, shorter than anything a person notices.
constexpr Clock::duration kSpinTime = std::chrono::microseconds(100);
// A spinning thread looks at the clock once in so many pauses. A pause takes 10 to 50 ns.
constexpr int kSpinsPerLook = 64;
// The caller that waits for the last task yields its processor after so many spins.
constexpr int kSpinsBeforeYield = 1000;
// A thread that is woken for a region wakes so many others, so that waking many takes few steps.
constexpr int kWakesEach = 2;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Binds a thread to some processors, in order. False, and nothing has changed, if it may use none of them.
bool bind(pthread_t thread, const std::vector<int>& processors) {
  const auto size = static_cast<size_t>(processors.back()) + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  CPU_ZERO_S(CPU_ALLOC_SIZE(size), set);
  for (int processor : processors) CPU_SET_S(static_cast<size_t>(processor), CPU_ALLOC_SIZE(size), set);
  const bool done = pthread_setaffinity_np(thread, CPU_ALLOC_SIZE(size), set) == 0;
  CPU_FREE(set);
  return done;
}

std::vector<Seat> own_seats(int num_threads, bool pinned) {
  if (num_threads > 0 && !pinned) return std::vector<Seat>(static_cast<size_t>(num_threads));
  const Topology topology = Topology::of_this_process();
  const int threads = num_threads > 0 ? num_threads : topology.default_threads();
  return pinned ? topology.seats(threads, threads) : std::vector<Seat>(static_cast<size_t>(threads));
}

// The number of tasks that nobody has taken yet; negative once threads looked for tasks and found none. A thread takes
// a task by decrementing the number from above zero.
struct alignas(64) Count {
  std::atomic<int64_t> left{0};
};

}  // namespace

// A region is: tasks (task, num_tasks, sharers), their counts, and then the number of the region, which wakes and
// starts the workers. Until a thread has taken its tasks off `unfinished` as well, the region cannot end: so whoever
// holds a task, and nobody else, may read what describes the tasks. A thread that comes late, or early, finds the
// counts of some region and takes tasks of that one or none; it needs to know nothing else.
struct ThreadPool::State {
  static constexpr int kNobody = -1;
  // Each kind of region has counts of its own: no thread can mistake one for the other.
  struct Worker {
    Count shared;  // tasks of its share that others may take
    Count own;     // tasks of its share that only it may run
    alignas(64) std::atomic<int> asleep{0};
    std::atomic<uint64_t> seen{0};  // the last region that it looked for tasks of
    int node = 0;
    std::thread thread;
  };

  // The calling thread writes these before a region, and workers read them; they share a cache line.
  alignas(64) std::atomic<uint64_t> region{0};
  std::atomic<int> participants{1};    // workers below it look for tasks
  std::atomic<int> wake_below{1};      // and these are woken for them
  std::atomic<bool> in_shares{false};  // tasks may be in the workers' counts
  std::atomic<bool> stopping{false};
  int sharers = 1;
  const Task* task = nullptr;
  int64_t num_tasks = 0;

  // All threads write these.
  Count common;
  alignas(64) std::atomic<int64_t> unfinished{0};

  // These are set before workers start, except for `num_threads` and `active`, which workers do not read.
  alignas(64) std::vector<Worker> workers;  // as many as were asked for
  int num_threads = 1;                      // as many as there are: the first ones of `workers`
  // Bit w % 64 of word w / 64: worker w is parked, or about to. Whoever clears the bit wakes the worker.
  std::vector<std::atomic<uint64_t>> parked;
  std::vector<int> num_nodes;  // memory nodes of the first 0, 1, 2, … workers
  int active = 1;
  int processors = 1;    // that this process may use
  bool spinning = true;  // the workers have a processor each
  int caller_processor = -1;

  explicit State(size_t num_workers) : workers(num_workers), parked((num_workers + 63) / 64) {}

  void start(Task& new_task, int64_t tasks, int new_participants, int wake) {
    task = &new_task;
    num_tasks = tasks;
    unfinished.store(tasks, std::memory_order_relaxed);
    participants.store(new_participants, std::memory_order_relaxed);
    wake_below.store(wake, std::memory_order_relaxed);
  }
  // Threads that have no task, or no processor to run on, need not be woken.
  int wanted(int64_t tasks) const { return static_cast<int>(std::min<int64_t>({tasks, active, processors})); }
  // Sequentially consistent, as is the parking of a worker: one of the two sides sees the other.
  void publish() { region.fetch_add(1); }

  // Wakes at most `most` parked workers that the region wants and that have not been in it.
  void wake(int most) {
    const uint64_t current = region.load();
    const int below = wake_below.load(std::memory_order_relaxed);
    for (int first = 0; first < below; first += 64) {
      std::atomic<uint64_t>& word = parked[static_cast<size_t>(first / 64)];
      const uint64_t wanted = below - first >= 64 ? ~uint64_t{0} : (uint64_t{1} << (below - first)) - 1;
      for (uint64_t bits = word.load() & wanted; bits != 0; bits &= bits - 1) {
        const uint64_t bit = bits & (~bits + 1);
        Worker& worker = workers[static_cast<size_t>(first + std::countr_zero(bit))];
        if (worker.seen.load(std::memory_order_relaxed) == current) continue;
        if ((word.fetch_and(~bit) & bit) == 0) continue;  // it woke by itself, or another thread wakes it
        worker.asleep.store(0);
        worker.asleep.notify_one();
        if (--most == 0) return;
      }
    }
  }

  // Takes tasks and runs them until there are none to take.
  void run_tasks(int worker) {
    int64_t done = run_all(workers[static_cast<size_t>(worker)].own, worker, worker);
    done += run_all(common, kNobody, worker);
    if (in_shares.load(std::memory_order_relaxed)) done += run_shares(worker);
    if (done > 0) unfinished.fetch_sub(done, std::memory_order_release);
  }

  // All that is left of one count, of the share of `owner`. Returns how many tasks that was.
  int64_t run_all(Count& count, int owner, int worker) {
    if (count.left.load(std::memory_order_relaxed) <= 0) return 0;  // it is another's line: only read
    int64_t left = count.left.fetch_sub(1, std::memory_order_acquire);
    if (left <= 0) return 0;
    // The region stays what it is until the tasks are taken off `unfinished`.
    const Task run = *task;
    const int64_t end = owner == kNobody ? num_tasks : share_begin(num_tasks, sharers, owner + 1);
    int64_t done = 0;
    for (; left > 0; left = count.left.fetch_sub(1, std::memory_order_acquire), ++done) run(end - left, worker);
    return done;
  }

  // Its own share, then what is left of others in its node, then of others.
  int64_t run_shares(int worker) {
    const auto run_share_of = [&](int owner) {
      return run_all(workers[static_cast<size_t>(owner)].shared, owner, worker);
    };
    int64_t done = run_share_of(worker);
    const int node = workers[static_cast<size_t>(worker)].node;
    const int others = participants.load(std::memory_order_relaxed);
    const uint64_t seen = workers[static_cast<size_t>(worker)].seen.load(std::memory_order_relaxed);
    for (const bool same_node : {true, false})
      for (int n = 1; n < others; ++n) {
        // The next region has begun: its own share comes first.
        if (worker != 0 && region.load(std::memory_order_relaxed) != seen) return done;
        const int owner = (worker + n) % others;
        if ((workers[static_cast<size_t>(owner)].node == node) == same_node) done += run_share_of(owner);
      }
    return done;
  }

  // The calling thread's part of a region that was published.
  void finish() {
    wake(kWakesEach);
    run_tasks(0);
    for (int spins = 0; unfinished.load(std::memory_order_acquire) > 0; ++spins) {
      if (spinning && spins < kSpinsBeforeYield)
        cpu_relax();
      else
        std::this_thread::yield();  // a worker lost its processor; give it this one
    }
  }

  // Waits for a region that this worker takes part in and has not seen. False: stop.
  bool await_region(int worker) {
    Worker& self = workers[static_cast<size_t>(worker)];
    const uint64_t seen = self.seen.load(std::memory_order_relaxed);
    const auto called = [&](std::memory_order order) {
      return region.load(order) != seen && worker < participants.load(order);
    };
    std::atomic<uint64_t>& word = parked[static_cast<size_t>(worker / 64)];
    const uint64_t bit = uint64_t{1} << (worker % 64);
    while (true) {
      const Clock::time_point start = Clock::now();
      do {
        for (int spins = 0; spins < kSpinsPerLook; ++spins) {
          if (stopping.load(std::memory_order_relaxed)) return false;
          if (called(std::memory_order_relaxed)) return true;
          cpu_relax();
        }
      } while (spinning && Clock::now() - start < kSpinTime);
      self.asleep.store(1);
      word.fetch_or(bit);
      if (!called(std::memory_order_seq_cst) && !stopping.load()) self.asleep.wait(1);
      // Whoever is woken wakes others.
      if ((word.fetch_and(~bit) & bit) == 0) wake(kWakesEach);
    }
  }

  // Creates the threads of workers 1, 2, … up to `count` threads with the caller. Returns the system's reason when one
  // cannot be created; num_threads says how many there are.
  std::string create_threads(int count, const std::vector<Seat>& seats) {
    for (num_threads = 1; num_threads < count; ++num_threads) {
      const int w = num_threads;
      std::thread& thread = workers[static_cast<size_t>(w)].thread;
      try {
        thread = std::thread([this, w] { work(w); });
      } catch (const std::system_error& error) {
        return error.what();
      }
      if (const int processor = seats[static_cast<size_t>(w)].processor; processor >= 0)
        bind(thread.native_handle(), {processor});
    }
    return {};
  }

  void join_threads() {
    stopping.store(true);
    wake_below.store(num_threads);
    publish();  // one that nobody has seen
    wake(num_threads);
    for (Worker& worker : workers)
      if (worker.thread.joinable()) worker.thread.join();
    stopping.store(false);
    num_threads = 1;
  }

  void work(int worker) {
    while (await_region(worker)) {
      workers[static_cast<size_t>(worker)].seen.store(region.load(), std::memory_order_relaxed);
      run_tasks(worker);
    }
  }
};

ThreadPool::ThreadPool(int num_threads, bool pin, const Logger& log) : ThreadPool(own_seats(num_threads, pin), log) {}

ThreadPool::ThreadPool(const std::vector<Seat>& seats, const Logger& log)
    : state_(std::make_unique<State>(seats.size())) {
  EADEM_CHECK(!seats.empty(), "a pool of no threads");
  State& s = *state_;
  s.caller_processor = seats[0].processor;
  s.processors = static_cast<int>(allowed_processors().size());
  // More workers than processors share them: a worker that spins would hold the processor that a task needs.
  s.spinning = std::ssize(seats) <= s.processors;
  std::set<int> nodes;
  s.num_nodes.push_back(0);
  for (size_t w = 0; w < seats.size(); ++w) {
    s.workers[w].node = seats[w].node;
    nodes.insert(seats[w].node);
    s.num_nodes.push_back(static_cast<int>(nodes.size()));
  }

  // Whoever reaches a limit has used it up, and what follows (files, buffers, threads of others) needs room as well: so
  // half of what could be created is kept.
  const auto wanted = static_cast<int>(seats.size());
  std::string reason = s.create_threads(wanted, seats);
  if (!reason.empty()) {
    for (std::string again = reason; !again.empty();) {
      const int half = std::max(1, s.num_threads / 2);
      s.join_threads();
      again = s.create_threads(half, seats);
    }
    log.log(LogLevel::warning, "only {} of {} threads: the system refuses to create more ({})", s.num_threads, wanted,
            reason);
  }
  s.active = num_threads();
}

ThreadPool::CallerSeat::CallerSeat(const ThreadPool& pool) {
  const State& s = *pool.state_;
  if (pool.num_nodes(pool.num_threads()) == 1 || s.caller_processor < 0) return;
  before_ = allowed_processors();
  if (!bind(pthread_self(), {s.caller_processor})) before_.clear();
}

ThreadPool::CallerSeat::~CallerSeat() {
  if (!before_.empty()) bind(pthread_self(), before_);
}

ThreadPool::~ThreadPool() { state_->join_threads(); }

int ThreadPool::num_threads() const { return state_->num_threads; }
int ThreadPool::active_threads() const { return state_->active; }
void ThreadPool::set_active_threads(int count) { state_->active = std::clamp(count, 1, num_threads()); }
int ThreadPool::node_of(int worker) const { return state_->workers[static_cast<size_t>(worker)].node; }

int ThreadPool::num_nodes(int count) const { return state_->num_nodes[static_cast<size_t>(count)]; }

void ThreadPool::parallel_for(int64_t num_tasks, Task task) {
  State& s = *state_;
  if (s.active == 1 || num_tasks <= 1) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index, 0);
    return;
  }
  s.start(task, num_tasks, s.active, s.wanted(num_tasks));
  s.in_shares.store(false, std::memory_order_relaxed);
  s.common.left.store(num_tasks, std::memory_order_release);
  s.publish();
  s.finish();
}

void ThreadPool::parallel_shares(int64_t num_tasks, Task task) {
  State& s = *state_;
  if (s.active == 1 || num_tasks <= 1) return parallel_for(num_tasks, task);
  // With several nodes every worker is woken, because part of the memory lies on its node.
  s.start(task, num_tasks, s.active, num_nodes(s.active) == 1 ? s.wanted(num_tasks) : s.active);
  s.sharers = s.active;
  s.in_shares.store(true, std::memory_order_relaxed);
  for (int w = 0; w < s.sharers; ++w)
    s.workers[static_cast<size_t>(w)].shared.left.store(
        share_begin(num_tasks, s.sharers, w + 1) - share_begin(num_tasks, s.sharers, w), std::memory_order_release);
  s.publish();
  s.finish();
}

void ThreadPool::parallel_own(int64_t num_tasks, int owners, Task task) {
  State& s = *state_;
  EADEM_CHECK(owners >= 1 && owners <= num_threads(), "{} of {} workers", owners, num_threads());
  if (num_tasks <= 0) return;
  s.start(task, num_tasks, owners, owners);
  s.sharers = owners;
  s.in_shares.store(false, std::memory_order_relaxed);
  for (int w = 0; w < owners; ++w)
    s.workers[static_cast<size_t>(w)].own.left.store(
        share_begin(num_tasks, owners, w + 1) - share_begin(num_tasks, owners, w), std::memory_order_release);
  s.publish();
  s.finish();
}

void ThreadPool::parallel_ranges(int64_t size, int64_t grain, FunctionRef<void(int64_t, int64_t, int)> body) {
  if (size <= 0) return;
  if (active_threads() == 1) return body(0, size, 0);
  const int64_t threads = active_threads(), shortest = std::max<int64_t>(grain, 1);
  struct Round {
    int64_t first, begin, length;  // range, item, items of each
  };
  std::array<Round, 64> rounds;  // each round leaves at most half of the range
  int num_rounds = 0;
  int64_t begin = 0, ranges = 0;
  while (begin < size) {
    const int64_t left = size - begin, length = std::max(shortest, (left + 2 * threads - 1) / (2 * threads));
    const int64_t count = length == shortest ? (left + length - 1) / length : threads;
    rounds[static_cast<size_t>(num_rounds++)] = {ranges, begin, length};
    ranges += count;
    begin += count * length;
  }
  parallel_for(ranges, [&](int64_t index, int worker) {
    int n = num_rounds - 1;
    while (rounds[static_cast<size_t>(n)].first > index) --n;
    const Round& round = rounds[static_cast<size_t>(n)];
    const int64_t from = round.begin + (index - round.first) * round.length;
    body(from, std::min(size, from + round.length), worker);
  });
}

}  // namespace eadem
