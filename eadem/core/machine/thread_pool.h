// SPDX-License-Identifier: Apache-2.0
//
// A fixed set of workers for short parallel regions. Workers spin for a while after a region and then park,
// so that hundreds of regions a token cost no system call and an idle engine costs no processor time.
//
// A region ends with its last task: a worker that wakes too late finds nothing left and nobody waits for it.
//
// One thread at a time may use a pool.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "eadem/core/function_ref.h"
#include "eadem/core/log.h"
#include "eadem/core/machine/topology.h"

namespace eadem {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread; 0 means Topology::default_threads: one per core that this process may use,
  // within its quota of processor time. With `pin`, each worker is bound to one of the processors this process may use
  // (the caller's thread is left alone, but see CallerSeat), spread over the machine's memory nodes.
  //
  // Where the system refuses to create that many threads (a limit on processes or on memory) the pool has fewer, down
  // to the calling thread alone, and `log` takes one warning with both numbers.
  explicit ThreadPool(int num_threads = 0, bool pin = true, const Logger& log = Logger());
  // One thread per seat (at least one), the calling thread on the first. A seat whose processor this process may not
  // use is as one without.
  explicit ThreadPool(const std::vector<Seat>& seats, const Logger& log = Logger());
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;  // all of them: worker numbers are below
  // The number of workers that take part in regions, counted from the first: all, unless set. `count` is clamped to
  // [1, num_threads()].
  int active_threads() const;
  void set_active_threads(int count);
  int node_of(int worker) const;
  // Memory nodes of the first `count` workers.
  int num_nodes(int count) const;

  using Task = FunctionRef<void(int64_t index, int worker)>;

  // Runs task(index, worker) for every index in [0, num_tasks); worker is in [0, num_threads()) and no two concurrent
  // calls share it (a worker that was active a moment ago may still help with the next region). Which worker runs which
  // task is not fixed: results must depend on the index alone. Returns when all are done. Not reentrant: a task must
  // not call it. Tasks must not throw.
  void parallel_for(int64_t num_tasks, Task task);

  // Runs tasks with a static partition, for tasks of which neighbours read neighbouring memory in every region: each
  // worker runs its share of the tasks in order, and then helps others, on its own node first.
  void parallel_shares(int64_t num_tasks, Task task);

  // Runs every task on the owner of its share and on no other worker, so that the worker which will read memory is the
  // first to write it. The owners are the first `owners` workers, active or not.
  void parallel_own(int64_t num_tasks, int owners, Task task);

  // The share of worker `worker` among `workers`: [share_begin(n, workers, w), share_begin(n, workers, w + 1)).
  static int64_t share_begin(int64_t num_tasks, int workers, int worker) { return num_tasks * worker / workers; }

  // Splits [0, size) into contiguous ranges of at least `grain` items (the last one may be shorter), and runs
  // body(begin, end, worker) on each. Ranges begin long and become shorter, so that a thread of half the speed is not
  // waited for at the end: in rounds of one range a thread, that divide half of what is left (Hummel, Schonberg and
  // Flynn, "Factoring", CACM 35(8), 1992).
  void parallel_ranges(int64_t size, int64_t grain, FunctionRef<void(int64_t begin, int64_t end, int worker)> body);
  void parallel_ranges(int64_t size, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body) {
    parallel_ranges(size, grain, [&](int64_t begin, int64_t end, int) { body(begin, end); });
  }

  // Binds the calling thread to the first seat until the object dies, where the seats are in several nodes: for a step,
  // or a load, after which the caller's thread is as it was.
  class CallerSeat {
   public:
    explicit CallerSeat(const ThreadPool& pool);
    ~CallerSeat();
    CallerSeat(const CallerSeat&) = delete;
    CallerSeat& operator=(const CallerSeat&) = delete;

   private:
    std::vector<int> before_;  // processors; none: nothing was changed
  };

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace eadem
