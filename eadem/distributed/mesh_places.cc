// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/mesh_places.h"

namespace eadem::distributed {

void check_mesh(const MeshShape& shape) {
  if (shape.dp < 1 || shape.tp < 1 || shape.pp < 1 || shape.ep < 1)
    throw InvalidArgument("a mesh of dp {} x tp {} x pp {} x ep {}; expected at least one each", shape.dp, shape.tp,
                          shape.pp, shape.ep);
}

MeshShape place_of(const MeshShape& shape, int index) {
  MeshShape place;
  place.tp = index % shape.tp;
  index /= shape.tp;
  place.ep = index % shape.ep;
  index /= shape.ep;
  place.pp = index % shape.pp;
  place.dp = index / shape.pp;
  return place;
}

int index_of(const MeshShape& shape, const MeshShape& place) {
  return ((place.dp * shape.pp + place.pp) * shape.ep + place.ep) * shape.tp + place.tp;
}

int group_of(const MeshShape& shape, MeshShape place, MeshAxis axis) {
  int* const coordinates[] = {&place.dp, &place.tp, &place.pp, &place.ep};
  *coordinates[static_cast<size_t>(axis)] = 0;
  return index_of(shape, place);
}

}  // namespace eadem::distributed
