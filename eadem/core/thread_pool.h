// SPDX-License-Identifier: Apache-2.0
//
// A fixed set of workers for short parallel regions. Workers spin for a while after a region and then park,
// so that hundreds of regions a token cost no system call and an idle engine costs no processor time.
//
// A region ends with its last task: a worker that wakes too late finds nothing left and nobody waits for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "eadem/core/function_ref.h"

namespace eadem {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread; 0 means one per available processor. With `pin`, each worker is
  // bound to one of the processors this process may use (the caller's thread is left alone).
  explicit ThreadPool(int num_threads = 0, bool pin = true);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs task(index, worker) for every index in [0, num_tasks); worker is in [0, num_threads()) and no two
  // concurrent calls share it. Which worker runs which task is not fixed: results must depend on the index alone.
  // Returns when all are done. Not reentrant: a task must not call it, and one thread at a time may.
  // Tasks must not throw.
  void parallel_for(int64_t num_tasks, FunctionRef<void(int64_t index, int worker)> task);

  // Splits [0, size) into contiguous ranges of at least `grain` items, a few per thread, and runs
  // body(begin, end) on each.
  void parallel_ranges(int64_t size, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body);

 private:
  using Task = FunctionRef<void(int64_t, int)>;

  void work(int worker);
  void run_tasks(int worker);
  bool await_tasks();  // false: stop

  // A thread takes one task by decrementing `unclaimed_` from above zero. Until it has taken the task off `unfinished_`
  // as well, parallel_for cannot return: so whoever holds a task, and nobody else, may read `task_` and `num_tasks_`.
  alignas(64) std::atomic<int64_t> unclaimed_{0};  // below zero when threads have come in vain
  const Task* task_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int> parked_workers_{0};
  std::atomic<int> wakings_{0};  // what parked workers wait for a change of
  std::atomic<bool> stopping_{false};
  bool spinning_ = true;  // set before the workers start
  std::vector<std::thread> workers_;
};

}  // namespace eadem
