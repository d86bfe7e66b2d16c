// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/forked_mesh.h"

namespace eadem::distributed {

ForkedMesh::ForkedMesh(const MeshShape& shape, const Body& body, ProcessGroupOptions options)
    : groups_(shape, options) {
  const auto live = [&](const std::shared_ptr<Communicator>& all) { groups_.live(all, body); };
  ranks_ = std::make_unique<ForkedRanks>(shape.num_ranks(), live, options, groups_.all());
  mesh_ = groups_.join(0, ranks_->communicator());
}

ForkedMesh::~ForkedMesh() {
  mesh_ = Mesh();
  ranks_.reset();
}

}  // namespace eadem::distributed
