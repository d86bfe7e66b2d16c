// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/mesh/mesh.h"

#include <algorithm>

namespace eadem {

std::string_view mesh_axis_name(MeshAxis axis) {
  switch (axis) {
    case MeshAxis::dp: return "dp";
    case MeshAxis::tp: return "tp";
    case MeshAxis::pp: return "pp";
    case MeshAxis::ep: return "ep";
  }
  return "?";
}

int Mesh::num_ranks() const {
  int product = 1;
  for (int axis = 0; axis < kNumMeshAxes; ++axis) product *= size(static_cast<MeshAxis>(axis));
  return product;
}

PartRange part_of(int64_t whole, int ranks, int rank) {
  const int64_t least = whole / ranks, larger = whole % ranks;
  return {rank * least + std::min<int64_t>(rank, larger), least + (rank < larger ? 1 : 0)};
}

}  // namespace eadem
