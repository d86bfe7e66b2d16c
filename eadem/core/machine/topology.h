// SPDX-License-Identifier: Apache-2.0
//
// The processors that a process may use: which share a core, and which memory node each belongs to.
//
// Memory lies in the node of the thread that first writes a page, and is read at full speed from that node alone. So
// threads get fixed seats, spread over the nodes, and what a thread reads again and again it writes first.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace eadem {

struct Processor {
  int id;       // the system's number
  int node;     // [0, num_nodes), in the order of the system's numbers
  int core;     // the smallest id among those that share its core
  int sibling;  // which of its core's processors it is, of those this process may use: 0 is the first

  friend bool operator==(const Processor&, const Processor&) = default;
};

// The CPU affinity of one thread.
struct Seat {
  int processor = -1;  // -1: anywhere
  int node = 0;

  friend bool operator==(const Seat&, const Seat&) = default;
};

class Topology {
 public:
  // Reads ROOT/node/node<N>/cpulist, ROOT/cpu/online and ROOT/cpu/cpu<N>/topology/thread_siblings_list, where the
  // kernel's ROOT is /sys/devices/system. Keeps the processors that are online and in `allowed` (ids; any order).
  // Never throws for what it reads: where something is missing, contradicts itself or is no list of processors, it
  // assumes one node, or one processor to a core, and says so in `notes`. `quota`: of processors' time, null for none.
  static Topology read(const std::string& root, const std::vector<int>& allowed,
                       std::optional<double> quota = std::nullopt);
  // This machine, for the processors that the calling thread may use and the quota of its control groups.
  static Topology of_this_process();

  const std::vector<Processor>& processors() const { return processors_; }  // by id; at least one
  int num_nodes() const { return num_nodes_; }                              // with a processor of ours
  int num_cores() const;
  std::optional<double> quota() const { return quota_; }
  // One per core, and not more than the quota, rounded down, but at least one. With more the system would stop all of
  // them for the rest of each of its periods (100 ms by default) once they have used up the quota, and every region
  // waits for the last thread. Rust's available_parallelism and Go's automaxprocs round down likewise.
  int default_threads() const;
  // Sentences about what could not be read, each with its path.
  const std::vector<std::string>& notes() const { return notes_; }

  // Seats of `all` threads. The first `first` of them, which may work without the rest, are spread over the nodes in
  // proportion to their cores and stand node by node, so that neighbours share a node; so do the others. Every core
  // gets a thread before one gets two. More threads than processors have no fixed place: their seats say so, and name
  // one node. 1 <= first <= all.
  std::vector<Seat> seats(int first, int all) const;

 private:
  std::vector<Processor> processors_;
  int num_nodes_ = 1;
  std::optional<double> quota_;
  std::vector<std::string> notes_;
};

// The processors that the calling thread may use, by id. At least one.
std::vector<int> allowed_processors();

}  // namespace eadem
