// SPDX-License-Identifier: Apache-2.0
//
// Mesh: the ranks that compute one model together, as a grid. Each axis divides something else, and each rank has a
// communicator with the ranks that differ from it in that axis alone.
#pragma once

#include <array>
#include <memory>

#include "eadem/core/mesh/communicator.h"
#include "eadem/core/mesh/mesh_axis.h"

namespace eadem {

// The mesh as one rank sees it. Copies share their communicators.
class Mesh {
 public:
  Mesh() = default;  // one rank, alone
  // Communicators in the order of MeshAxis; null: one rank along that axis.
  explicit Mesh(std::array<std::shared_ptr<Communicator>, kNumMeshAxes> axes) : axes_(std::move(axes)) {}
  // Ranks of one axis only.
  Mesh(MeshAxis axis, std::shared_ptr<Communicator> communicator) {
    axes_[static_cast<size_t>(axis)] = std::move(communicator);
  }

  int size(MeshAxis axis) const { return is_alone(axis) ? 1 : axes_[static_cast<size_t>(axis)]->size(); }
  int rank(MeshAxis axis) const { return is_alone(axis) ? 0 : axes_[static_cast<size_t>(axis)]->rank(); }
  // On an axis of one rank every collective is the identity.
  Communicator& along(MeshAxis axis) const {
    static SingleRank alone;  // has no state
    return is_alone(axis) ? alone : *axes_[static_cast<size_t>(axis)];
  }
  int num_ranks() const;

 private:
  bool is_alone(MeshAxis axis) const { return axes_[static_cast<size_t>(axis)] == nullptr; }
  std::array<std::shared_ptr<Communicator>, kNumMeshAxes> axes_;
};

// The device and the mesh that a kernel or pipeline runs with. It is passed, never global.
struct Context {
  Device& device;
  const Mesh& mesh;
};

}  // namespace eadem
