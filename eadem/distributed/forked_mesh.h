// SPDX-License-Identifier: Apache-2.0
//
// ForkedMesh: a mesh whose ranks are this process and processes that are forked from it (forked_ranks.h).
//
// When one rank dies or throws, calls of all others throw RankFailed with the reason, along every axis.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "eadem/distributed/forked_ranks.h"

namespace eadem::distributed {

class ForkedMesh {
 public:
  // What ranks 1, 2, … do; they end as those of RankBody. Ranks are numbered as those of run_mesh.
  using Body = std::function<void(const Mesh& mesh, int rank)>;

  // Returns when all ranks have joined. Throws InvalidArgument for a shape with an empty axis or of more ranks than a
  // group may have, and as ForkedRanks does.
  ForkedMesh(const MeshShape& shape, const Body& body, ProcessGroupOptions options = {});
  ~ForkedMesh();

  // Of rank 0, which is this process. What uses it must be gone before this object.
  const Mesh& mesh() const { return mesh_; }
  // Of ranks 1, 2, …
  const std::vector<pid_t>& processes() const { return ranks_->processes(); }

 private:
  // Joins the groups of a rank.
  Mesh join(int rank, const std::shared_ptr<Communicator>& all) const;

  MeshShape shape_;
  // By axis and the smallest rank; none where one axis has all ranks, whose group is that of the processes.
  std::map<std::pair<MeshAxis, int>, std::unique_ptr<ProcessGroup>> groups_;
  std::unique_ptr<ForkedRanks> ranks_;
  Mesh mesh_;
};

}  // namespace eadem::distributed
