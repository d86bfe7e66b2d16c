// SPDX-License-Identifier: Apache-2.0
//
// ForkedMesh: a mesh whose ranks are this process and processes that are forked from it (forked_ranks.h).
//
// When one rank dies or throws, calls of all others throw RankFailed with the reason, along every axis.
#pragma once

#include <functional>
#include <memory>

#include "eadem/distributed/forked_ranks.h"
#include "eadem/distributed/mesh_groups.h"

namespace eadem::distributed {

class ForkedMesh {
 public:
  // Every rank but the first runs this in its own process, which ends when it returns or throws. Ranks are numbered
  // with tp fastest, then ep, then pp, then dp.
  using Body = std::function<void(const Mesh& mesh, int rank)>;

  // Returns when all ranks have joined. Throws InvalidArgument for a shape with an empty axis or of more ranks than a
  // group may have, and as ForkedRanks does.
  ForkedMesh(const MeshShape& shape, const Body& body, ProcessGroupOptions options = {});
  ~ForkedMesh();

  // The mesh as rank 0 sees it, which is this process. It must outlive whatever uses it.
  const Mesh& mesh() const { return mesh_; }
  // The process numbers of the other ranks, in order.
  const std::vector<pid_t>& processes() const { return ranks_->processes(); }

 private:
  MeshGroups groups_;
  std::unique_ptr<ForkedRanks> ranks_;
  Mesh mesh_;
};

}  // namespace eadem::distributed
