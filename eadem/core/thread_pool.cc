// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace eadem {

namespace {

// About 50 us of spinning: longer than the gap between the regions of a decode step, shorter than anything
// a person notices. On two shared cores, more starves the thread that prepares the next region.
constexpr int kSpinsBeforePark = 4000;

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
  for (int worker = 1; worker < num_threads; ++worker) {
    workers_.emplace_back([this, worker] { work(worker); });
    // More workers than processors share them; the scheduler places those better than a fixed pin.
    if (pin && num_threads <= static_cast<int>(processors.size())) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(processors[worker], &set);
      pthread_setaffinity_np(workers_.back().native_handle(), sizeof(set), &set);
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_.store(true);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_tasks(int worker) {
  const Task& task = *task_;
  const int64_t num_tasks = num_tasks_;
  for (int64_t index = next_task_.fetch_add(1, std::memory_order_relaxed); index < num_tasks;
       index = next_task_.fetch_add(1, std::memory_order_relaxed))
    task(index, worker);
}

void ThreadPool::parallel_for(int64_t num_tasks, FunctionRef<void(int64_t, int)> task) {
  if (workers_.empty() || num_tasks <= 1) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index, 0);
    return;
  }
  task_ = &task;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  busy_workers_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  generation_.fetch_add(1);  // sequentially consistent, as is the parked count: one of the two sides sees the other
  if (parked_workers_.load() > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  run_tasks(0);
  for (int spins = 0; busy_workers_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpinsBeforePark)
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

void ThreadPool::work(int worker) {
  uint32_t seen = 0;
  while (true) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpinsBeforePark) {
        cpu_relax();
        continue;
      }
      std::unique_lock lock(mutex_);
      parked_workers_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
      parked_workers_.fetch_sub(1);
    }
    ++seen;
    if (stopping_.load()) return;
    run_tasks(worker);
    busy_workers_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace eadem
