// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are threads of one process and compute in host memory: what tests run on, and a reference for the
// communicators of processes.
//
// Every call meets the same call of the other ranks. Results depend on the buffers alone. When one rank fails, calls of
// the others that wait for it, and all later ones, throw RankFailed. Calls with unlike sizes or of unlike collectives
// throw InvalidArgument on every rank instead of waiting for ever.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "eadem/core/mesh/mesh.h"

namespace eadem::distributed {

class ThreadGroup {
 public:
  explicit ThreadGroup(int size);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  // The communicator of a rank, to be used by its thread. It outlives the group.
  std::shared_ptr<Communicator> communicator(int rank) const;
  // Makes waiting and later calls of every rank throw RankFailed with `reason`. May be called from any thread.
  void fail(const std::string& reason);

 private:
  struct Shared;
  friend class ThreadCommunicator;
  std::shared_ptr<Shared> shared_;
};

// Runs `body` once for every rank of a mesh, each on a thread of its own with its own view of the mesh, and returns
// when all have ended. Ranks are numbered with tp fastest, then ep, then pp, then dp. When a rank throws, the others
// get RankFailed from their collectives; the first error that is no consequence of another is thrown here.
void run_mesh(const MeshShape& shape, const std::function<void(const Mesh&)>& body);

}  // namespace eadem::distributed
