// SPDX-License-Identifier: Apache-2.0
//
// The axes of a mesh of ranks, and the division of an extent over the ranks of one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace eadem {

enum class MeshAxis : uint8_t {
  dp,  // data: each rank has sequences of its own
  tp,  // tensors: each rank has a part of every large matrix
  pp,  // pipeline: each rank has some of the layers
  ep,  // experts: each rank has some of the experts
};
inline constexpr int kNumMeshAxes = 4;

std::string_view mesh_axis_name(MeshAxis axis);

// The numbers of ranks along the axes, or the place of a rank on them.
struct MeshShape {
  int dp = 1, tp = 1, pp = 1, ep = 1;
  int operator[](MeshAxis axis) const { return std::array{dp, tp, pp, ep}[static_cast<size_t>(axis)]; }
  int num_ranks() const { return dp * tp * pp * ep; }
};

// A part of an extent.
struct PartRange {
  int64_t begin = 0;
  int64_t size = 0;
};

// The part of `whole` that falls to `rank` of `ranks`: consecutive parts, the first whole % ranks of them larger by
// one.
PartRange part_of(int64_t whole, int ranks, int rank);

}  // namespace eadem
