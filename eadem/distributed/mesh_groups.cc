// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/mesh_groups.h"

#include <unistd.h>

#include "eadem/distributed/mesh_places.h"

namespace eadem::distributed {

namespace {

constexpr std::array kMeshAxes = {MeshAxis::dp, MeshAxis::tp, MeshAxis::pp, MeshAxis::ep};

}  // namespace

MeshGroups::MeshGroups(const MeshShape& shape, const ProcessGroupOptions& options) : shape_(shape) {
  check_mesh(shape);
  make([&](int size) { return std::make_unique<ProcessGroup>(size, options); });
}

MeshGroups::MeshGroups(const MeshShape& shape, int first_descriptor) : shape_(shape) {
  check_mesh(shape);
  // One map after another in one order: that of axes and ranks, as all() lists them.
  make([](int) { return std::unique_ptr<ProcessGroup>(); });
  for (auto& [place, group] : groups_) group.reset(new ProcessGroup(ProcessGroup::open(first_descriptor++)));
}

void MeshGroups::make(const std::function<std::unique_ptr<ProcessGroup>(int size)>& group) {
  for (MeshAxis axis : kMeshAxes) {
    if (shape_[axis] == 1 || shape_[axis] == shape_.num_ranks()) continue;
    for (int rank = 0; rank < shape_.num_ranks(); ++rank) {
      const std::pair place(axis, group_of(shape_, place_of(shape_, rank), axis));
      if (!groups_.contains(place)) groups_[place] = group(shape_[axis]);
    }
  }
}

std::vector<ProcessGroup*> MeshGroups::all() const {
  std::vector<ProcessGroup*> groups;
  for (const auto& [place, group] : groups_) groups.push_back(group.get());
  return groups;
}

Mesh MeshGroups::join(int rank, const std::shared_ptr<Communicator>& processes) const {
  const MeshShape place = place_of(shape_, rank);
  std::array<std::shared_ptr<Communicator>, kNumMeshAxes> communicators;
  for (MeshAxis axis : kMeshAxes) {
    if (shape_[axis] == 1) continue;
    communicators[static_cast<size_t>(axis)] =
        shape_[axis] == shape_.num_ranks() ? processes
                                           : groups_.at({axis, group_of(shape_, place, axis)})->join(place[axis]);
  }
  return Mesh(std::move(communicators));
}

void MeshGroups::live(const std::shared_ptr<Communicator>& processes,
                      const std::function<void(const Mesh&, int rank)>& body) const {
  const int rank = processes->rank();
  Mesh mesh;  // outlives the handlers: a rank says why it ends before it leaves the groups
  try {
    mesh = join(rank, processes);
    body(mesh, rank);
  } catch (const RankFailed&) {
    throw;
  } catch (const std::exception& error) {
    for (const auto& [place, group] : groups_)
      group->fail(fmt::format("rank {} (process {}): {}", rank, getpid(), error.what()));
    throw;
  }
}

}  // namespace eadem::distributed
