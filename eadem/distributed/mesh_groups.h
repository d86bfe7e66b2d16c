// SPDX-License-Identifier: Apache-2.0
//
// MeshGroups: the groups of processes along the axes of a mesh. Where one axis has all ranks, its group is that of the
// processes, and there are no others.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "eadem/core/mesh/mesh.h"
#include "eadem/distributed/process_communicator.h"

namespace eadem::distributed {

class MeshGroups {
 public:
  // Makes them. Throws InvalidArgument for a shape with an empty axis or of more ranks than a group may have.
  MeshGroups(const MeshShape& shape, const ProcessGroupOptions& options);
  // Opens those of another process, whose descriptors this one has inherited, from `first` on, in the order of all().
  MeshGroups(const MeshShape& shape, int first_descriptor);

  std::vector<ProcessGroup*> all() const;
  // The mesh as rank `rank` sees it, which joins its groups; `processes` is the communicator of all ranks.
  Mesh join(int rank, const std::shared_ptr<Communicator>& processes) const;
  // Runs `body` with the mesh of this process, which is one rank. An exception fails every group, so that also the
  // ranks that share no group with this one throw RankFailed.
  void live(const std::shared_ptr<Communicator>& processes,
            const std::function<void(const Mesh&, int rank)>& body) const;

 private:
  void make(const std::function<std::unique_ptr<ProcessGroup>(int size)>& group);

  MeshShape shape_;
  std::map<std::pair<MeshAxis, int>, std::unique_ptr<ProcessGroup>> groups_;  // by axis and the smallest rank
};

}  // namespace eadem::distributed
