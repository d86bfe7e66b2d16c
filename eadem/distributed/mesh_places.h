// SPDX-License-Identifier: Apache-2.0
//
// The numbers of the ranks of a mesh: tp is fastest, then ep, pp and dp.
#pragma once

#include "eadem/core/mesh/mesh.h"

namespace eadem::distributed {

// Throws InvalidArgument unless every axis has a rank.
void check_mesh(const MeshShape& shape);

// The place of rank `index` on the mesh, and back.
MeshShape place_of(const MeshShape& shape, int index);
int index_of(const MeshShape& shape, const MeshShape& place);

// The smallest index among the ranks that differ from `place` along `axis` alone: the name of their group.
int group_of(const MeshShape& shape, MeshShape place, MeshAxis axis);

}  // namespace eadem::distributed
