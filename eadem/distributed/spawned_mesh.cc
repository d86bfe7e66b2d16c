// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/spawned_mesh.h"

namespace eadem::distributed {

SpawnedMesh::SpawnedMesh(const MeshShape& shape, const std::vector<std::string>& command)
    : groups_(shape, SpawnedRanks::kSpawnOptions) {
  ranks_ = std::make_unique<SpawnedRanks>(shape.num_ranks(), command, SpawnedRanks::kSpawnOptions, groups_.all());
  mesh_ = groups_.join(0, ranks_->communicator());
}

SpawnedMesh::~SpawnedMesh() {
  mesh_ = Mesh();
  ranks_.reset();
}

void live_on_spawned_mesh(const MeshShape& shape, const std::string& descriptor, const std::string& rank,
                          const std::string& parent,
                          const std::function<void(const Mesh& mesh, const std::shared_ptr<Communicator>& all)>& body) {
  std::unique_ptr<MeshGroups> groups;  // outlives the rank's life, as its own group does
  live_as_spawned_rank(descriptor, rank, parent, [&](const std::shared_ptr<Communicator>& all) {
    groups = std::make_unique<MeshGroups>(shape, std::stoi(descriptor) + 1);
    groups->live(all, [&](const Mesh& mesh, int) { body(mesh, all); });
  });
}

}  // namespace eadem::distributed
