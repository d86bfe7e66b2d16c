// SPDX-License-Identifier: Apache-2.0
//
// A sum that needs every rank of a mesh, along every axis.
#pragma once

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/mesh/mesh.h"

namespace eadem::test {

// Adds up the numbers of the ranks along each axis in turn. Every rank gets the sum over the whole mesh.
inline float sum_over_mesh(const Mesh& mesh, int rank) {
  CpuDevice device({.num_threads = 1});
  auto value = static_cast<float>(rank);
  for (MeshAxis axis : {MeshAxis::dp, MeshAxis::tp, MeshAxis::pp, MeshAxis::ep})
    mesh.along(axis).all_reduce_sum(device, TensorView(&value, DType::f32, Shape{1}));
  return value;
}

}  // namespace eadem::test
