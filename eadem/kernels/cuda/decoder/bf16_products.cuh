// SPDX-License-Identifier: Apache-2.0
//
// Products with weights in bf16, and the activations that they read. A row of a product is one chain of mma.sync over
// ascending k, with the bits of linear_stream.cu, so that a tile is one warp's: it reads 16 rows of the weight where a
// tensor map put them.
#pragma once

#include "eadem/kernels/cuda/decoder/ring.cuh"

namespace eadem::kernels::cuda::decoder {
namespace {

// Where pair `pair` of neighbouring columns, counted from the first of eight, stands in an activation, in bytes. Two
// steps of a chain have 32 columns, as [4 lanes][2 steps][2 halves of a step][2 columns]: a lane's four words are
// neighbours.
__device__ inline uint32_t bf16_place(int column, int pair) {
  return static_cast<uint32_t>(column / 32 * 64 + pair * 16 + column % 32 / 8 * 4);
}
// Stores eight columns from `column` on.
__device__ inline void store_bf16(uint8_t* row, int column, const uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(row + bf16_place(column, i)) = pairs[i];
}

// What a warp multiplies of a panel of 64 columns.
struct Bf16Fragments {
  static constexpr int kSteps = 4;
  uint32_t weight[kSteps][4];
  uint4 x[kSteps / 2];

  // `panel`: the address of its 16 rows. `columns`: those of the activation.
  __device__ void load(uint32_t panel, const uint8_t* columns, int lane) {
    const uint32_t row = panel + static_cast<uint32_t>(lane % kTileRows) * kPanelRowBytes,
                   piece = static_cast<uint32_t>((lane / kTileRows ^ lane % 8) * 16);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      load_matrices(weight[step], row + (piece ^ static_cast<uint32_t>(step * 32)));
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) x[i] = reinterpret_cast<const uint4*>(columns)[i * 4 + lane % 4];
  }
  __device__ void multiply(float (&sum)[4]) const {
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      mma(sum, weight[2 * i], x[i].x, x[i].y);
      mma(sum, weight[2 * i + 1], x[i].z, x[i].w);
    }
  }
};

// By a warp: goes on with the chains of a tile, whose slots are `slot`, `slot` + `stride` and so on, over as many
// columns of the activation `x`. Lane 4 g has rows g and g + 8 in sum[0] and sum[2]. A dependent product begins every
// 24 clocks at best, so fragments are loaded one panel ahead.
template <typename W>
__device__ inline void multiply_chains(float (&sum)[4], const Ring<W>& ring, uint32_t slot, uint32_t stride, int slots,
                                       const uint8_t* x, int lane) {
  constexpr int kPanels = kRowSlotBytes / kPanelRowBytes, kPartPanels = kPanels / kSlotParts;
  constexpr uint32_t kPanelBytes = kTileRows * kPanelRowBytes;
  Bf16Fragments f[2];
  const auto load = [&](uint32_t of_slot, int panel, const uint8_t* columns) {
    const uint8_t* at = panel % kPartPanels == 0 ? ring.wait(of_slot, panel / kPartPanels) : ring.at(of_slot);
    if (panel % kPartPanels == 0) __syncwarp();
    f[panel % 2].load(shared_address(at) + static_cast<uint32_t>(panel) * kPanelBytes,
                      columns + panel * static_cast<int>(kPanelRowBytes), lane);
  };
  load(slot, 0, x);
#pragma unroll 1
  for (int i = 0; i < slots; ++i, slot += stride, x += kRowSlotBytes) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel + 1 < kPanels)
        load(slot, panel + 1, x);
      else if (i + 1 < slots)
        load(slot + stride, 0, x + kRowSlotBytes);
      f[panel % 2].multiply(sum);
    }
    __syncwarp();
    if (lane == 0) ring.free_whole(slot);
  }
}

}  // namespace
}  // namespace eadem::kernels::cuda::decoder
