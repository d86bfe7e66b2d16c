// SPDX-License-Identifier: Apache-2.0
//
// SpawnedMesh: a mesh whose ranks are this process and processes that run a program of their own (spawned_ranks.h), for
// a process that may have threads.
//
// When one rank dies or throws, calls of all others throw RankFailed with the reason, along every axis.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "eadem/distributed/mesh_groups.h"
#include "eadem/distributed/spawned_ranks.h"

namespace eadem::distributed {

class SpawnedMesh {
 public:
  // Returns when all ranks have joined. The program passes its last three arguments, and the same shape, to
  // live_on_spawned_mesh(). Throws InvalidArgument for a shape with an empty axis or of more ranks than a group may
  // have, and as SpawnedRanks does.
  SpawnedMesh(const MeshShape& shape, const std::vector<std::string>& command);
  ~SpawnedMesh();

  // The mesh as rank 0 sees it, which is this process, and the communicator of all ranks. Both must outlive whatever
  // uses them.
  const Mesh& mesh() const { return mesh_; }
  const std::shared_ptr<Communicator>& all() const { return ranks_->communicator(); }
  // The process numbers of the other ranks, in order.
  const std::vector<pid_t>& processes() const { return ranks_->processes(); }

 private:
  MeshGroups groups_;
  std::unique_ptr<SpawnedRanks> ranks_;
  Mesh mesh_;
};

// Runs `body` in a process that SpawnedMesh has started. Ranks are numbered with tp fastest, then ep, then pp, then dp.
// Returns when the process is to end.
void live_on_spawned_mesh(const MeshShape& shape, const std::string& descriptor, const std::string& rank,
                          const std::string& parent,
                          const std::function<void(const Mesh& mesh, const std::shared_ptr<Communicator>& all)>& body);

}  // namespace eadem::distributed
