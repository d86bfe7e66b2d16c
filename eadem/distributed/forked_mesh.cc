// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/forked_mesh.h"

#include <unistd.h>

#include "eadem/distributed/mesh_places.h"

namespace eadem::distributed {

namespace {

constexpr std::array kMeshAxes = {MeshAxis::dp, MeshAxis::tp, MeshAxis::pp, MeshAxis::ep};

}  // namespace

ForkedMesh::ForkedMesh(const MeshShape& shape, const Body& body, ProcessGroupOptions options) : shape_(shape) {
  check_mesh(shape);
  std::vector<ProcessGroup*> groups;
  for (MeshAxis axis : kMeshAxes) {
    if (shape[axis] == 1 || shape[axis] == shape.num_ranks()) continue;
    for (int rank = 0; rank < shape.num_ranks(); ++rank) {
      std::unique_ptr<ProcessGroup>& group = groups_[{axis, group_of(shape, place_of(shape, rank), axis)}];
      if (group != nullptr) continue;
      group = std::make_unique<ProcessGroup>(shape[axis], options);
      groups.push_back(group.get());
    }
  }
  const auto live = [&](const std::shared_ptr<Communicator>& all) {
    const int rank = all->rank();
    try {
      body(join(rank, all), rank);
    } catch (const RankFailed&) {
      throw;
    } catch (const std::exception& error) {
      for (ProcessGroup* group : groups)
        group->fail(fmt::format("rank {} (process {}): {}", rank, getpid(), error.what()));
      throw;
    }
  };
  ranks_ = std::make_unique<ForkedRanks>(shape.num_ranks(), live, options, groups);
  mesh_ = join(0, ranks_->communicator());
}

ForkedMesh::~ForkedMesh() {
  mesh_ = Mesh();
  ranks_.reset();
}

Mesh ForkedMesh::join(int rank, const std::shared_ptr<Communicator>& all) const {
  const MeshShape place = place_of(shape_, rank);
  std::array<std::shared_ptr<Communicator>, kNumMeshAxes> communicators;
  for (MeshAxis axis : kMeshAxes) {
    if (shape_[axis] == 1) continue;
    communicators[static_cast<size_t>(axis)] =
        shape_[axis] == shape_.num_ranks() ? all : groups_.at({axis, group_of(shape_, place, axis)})->join(place[axis]);
  }
  return Mesh(std::move(communicators));
}

}  // namespace eadem::distributed
