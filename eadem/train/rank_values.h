// SPDX-License-Identifier: Apache-2.0
//
// Small values that the ranks of a mesh tell each other between steps. All ranks of the axis, or of the mesh, call a
// function together, with as many values each.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/mesh/mesh.h"

namespace eadem::train {

// Whether this rank is the first along every axis: the one that prints and writes files.
bool is_first_rank(const Mesh& mesh);

// The values of all ranks of an axis, in their order.
std::vector<int64_t> gather_values(Device& device, const Mesh& mesh, MeshAxis axis, std::span<const int64_t> values);

// The text of every rank of an axis, in their order; texts may differ in length.
std::vector<std::string> gather_texts(Device& device, const Mesh& mesh, MeshAxis axis, const std::string& text);

// The value that the first rank of the mesh has.
int64_t value_of_first_rank(Device& device, const Mesh& mesh, int64_t value);

// Whether it is true on every rank of the mesh.
bool true_on_all_ranks(Device& device, const Mesh& mesh, bool value);

// A tensor of which the ranks of an axis have parts along dimension `dim`, part_of(whole, ranks, rank) each: joined on
// the host of the axis's first rank, and undefined on the others. `part` is on the host, plain.
Tensor join_parts(Device& device, const Mesh& mesh, MeshAxis axis, const Tensor& part, int dim, int64_t whole);

}  // namespace eadem::train
