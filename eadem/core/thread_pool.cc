// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace eadem {

namespace {

using Clock = std::chrono::steady_clock;

// Longer than the gap between the regions of a decode step, shorter than anything a person notices.
constexpr Clock::duration kSpinTime = std::chrono::microseconds(100);
// Between two looks at the clock. A pause is 10 to 50 ns.
constexpr int kSpinsPerLook = 64;
// Of the caller that waits for the last task.
constexpr int kSpinsBeforeYield = 1000;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::vector<int> allowed_processors() {
  std::vector<int> result;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) result.push_back(cpu);
  return result;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, bool pin) {
  const std::vector<int> processors = allowed_processors();
  if (num_threads <= 0) num_threads = std::max<int>(1, static_cast<int>(processors.size()));
  // More workers than processors share them: the scheduler places those better than a fixed pin, and a worker that
  // spins would hold the processor that a task needs.
  const bool one_each = num_threads <= static_cast<int>(processors.size());
  spinning_ = one_each;
  for (int worker = 1; worker < num_threads; ++worker) {
    workers_.emplace_back([this, worker] { work(worker); });
    if (pin && one_each) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(processors[worker], &set);
      pthread_setaffinity_np(workers_.back().native_handle(), sizeof(set), &set);
    }
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  wakings_.fetch_add(1);
  wakings_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_tasks(int worker) {
  int64_t left = unclaimed_.fetch_sub(1, std::memory_order_acquire);
  if (left <= 0) return;
  const Task task = *task_;
  const int64_t num_tasks = num_tasks_;
  int64_t done = 0;
  for (; left > 0; left = unclaimed_.fetch_sub(1, std::memory_order_acquire), ++done) task(num_tasks - left, worker);
  unfinished_.fetch_sub(done, std::memory_order_release);
}

void ThreadPool::parallel_for(int64_t num_tasks, FunctionRef<void(int64_t, int)> task) {
  if (workers_.empty() || num_tasks <= 1) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index, 0);
    return;
  }
  task_ = &task;
  num_tasks_ = num_tasks;
  unfinished_.store(num_tasks, std::memory_order_relaxed);
  unclaimed_.store(num_tasks);  // sequentially consistent, as is the parked count: one of the two sides sees the other
  if (const int parked = parked_workers_.load(); parked > 0) {
    wakings_.fetch_add(1);
    if (num_tasks > parked)
      wakings_.notify_all();
    else
      for (int64_t helper = 1; helper < num_tasks; ++helper) wakings_.notify_one();
  }
  run_tasks(0);
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spinning_ && spins < kSpinsBeforeYield)
      cpu_relax();
    else
      std::this_thread::yield();  // a worker lost its processor; give it this one
  }
}

void ThreadPool::parallel_ranges(int64_t size, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  if (size <= 0) return;
  const int64_t max_ranges = 4 * static_cast<int64_t>(num_threads());  // a few each, so that a slow thread evens out
  const int64_t length = std::max({grain, (size + max_ranges - 1) / max_ranges, int64_t{1}});
  const int64_t num_ranges = (size + length - 1) / length;
  parallel_for(num_ranges, [&](int64_t index, int) { body(index * length, std::min(size, (index + 1) * length)); });
}

bool ThreadPool::await_tasks() {
  while (true) {
    const Clock::time_point start = Clock::now();
    do {
      for (int spins = 0; spins < kSpinsPerLook; ++spins) {
        if (stopping_.load(std::memory_order_relaxed)) return false;
        if (unclaimed_.load(std::memory_order_relaxed) > 0) return true;
        cpu_relax();
      }
    } while (spinning_ && Clock::now() - start < kSpinTime);
    parked_workers_.fetch_add(1);
    const int wakings = wakings_.load();
    if (unclaimed_.load() <= 0 && !stopping_.load()) wakings_.wait(wakings);
    parked_workers_.fetch_sub(1);
  }
}

void ThreadPool::work(int worker) {
  while (await_tasks()) run_tasks(worker);
}

}  // namespace eadem
