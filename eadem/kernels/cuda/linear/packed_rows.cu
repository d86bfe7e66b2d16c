// SPDX-License-Identifier: Apache-2.0
//
// Readers of encoded weights (FragmentBlocks) that multiply nothing, by a warp for each piece of a block.
#include "eadem/kernels/cuda/instructions/mma.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fragment_decode.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kUnpackWarps = 4;

// y [rows, in] = the weight, rounded to bf16. One block for each block of the weight.
__global__ void __launch_bounds__(kUnpackWarps* kWarp)
    unpack_blocks(const __grid_constant__ FragmentLayout layout, const uint8_t* weight, __nv_bfloat16* y, int64_t rows,
                  int64_t in) {
  static_assert(kUnpackWarps == kFragmentPieces);
  constexpr int kRowPitch = kFragmentPieceColumns + 8;
  __shared__ GroupDecoding groups[kUnpackWarps][kPieceGroups];
  __shared__ __align__(16) __nv_bfloat16 values[kUnpackWarps][kFragmentBlockRows * kRowPitch];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first_row = int64_t{blockIdx.y} * kFragmentBlockRows;
  const int64_t column = int64_t{blockIdx.x} * kFragmentBlockColumns + warp * kFragmentPieceColumns;
  allow_next_kernel();
  wait_for_earlier_kernels();  // one may still read y
  if (column >= in) return;
  const uint8_t* block = weight + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * layout.block_bytes;
  __nv_bfloat16* piece = values[warp];
  with_decoder(layout, [&](const auto& decoder) {
    decoder.template prepare<1>(block, warp, lane, groups[warp]);
    decoder.decode(block, warp, 0, lane, groups[warp], [&](int step, int r, int h, float low, float high) {
      const int at = (lane / 4 + 8 * r) * kRowPitch + 16 * step + 8 * h + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(piece + at) = pack_bf16(low, high);
    });
  });
  __syncwarp();
  constexpr int kLanesOfRow = kFragmentPieceColumns / 8;
#pragma unroll
  for (int i = lane; i < kFragmentBlockRows * kLanesOfRow; i += kWarp) {
    const int row = i / kLanesOfRow, at = i % kLanesOfRow * 8;
    if (first_row + row < rows)
      *reinterpret_cast<uint4*>(y + (first_row + row) * in + column + at) =
          *reinterpret_cast<const uint4*>(piece + row * kRowPitch + at);
  }
}

// y[t, :] = scale * table[ids[t] - first, :], or zeros where the table has no such row. One block for each token and
// every kUnpackWarps pieces.
template <typename Y>
__global__ void __launch_bounds__(kUnpackWarps* kWarp)
    gather_packed_rows(const __grid_constant__ EmbeddingParams p, const __grid_constant__ FragmentLayout layout) {
  __shared__ GroupDecoding groups[kUnpackWarps][kPieceGroups];
  __shared__ float values[kUnpackWarps][kFragmentBlockRows][kFragmentPieceColumns];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t column = (int64_t{blockIdx.y} * kUnpackWarps + warp) * kFragmentPieceColumns;
  if (column >= p.hidden) return;
  Y* y = static_cast<Y*>(p.y) + blockIdx.x * p.hidden + column;
  const int64_t row = p.ids[blockIdx.x] - p.first;
  if (row < 0 || row >= p.vocab) {
    for (int i = lane; i < kFragmentPieceColumns; i += kWarp) store(y + i, 0.0f);
    return;
  }
  const int64_t chunks = ceil_div(p.hidden, kFragmentBlockColumns);
  const auto* block = static_cast<const uint8_t*>(p.table) +
                      (row / kFragmentBlockRows * chunks + column / kFragmentBlockColumns) * layout.block_bytes;
  const int piece = static_cast<int>(column / kFragmentPieceColumns % kFragmentPieces);
  // All rows of the block are decoded, and one is taken.
  float(&decoded)[kFragmentBlockRows][kFragmentPieceColumns] = values[warp];
  with_decoder(layout, [&](const auto& decoder) {
    decoder.template prepare<1>(block, piece, lane, groups[warp]);
    decoder.decode(block, piece, 0, lane, groups[warp], [&](int step, int r, int h, float low, float high) {
      float* to = &decoded[lane / 4 + 8 * r][16 * step + 8 * h + lane % 4 * 2];
      to[0] = low, to[1] = high;
    });
  });
  __syncwarp();
  const float* wanted = decoded[row % kFragmentBlockRows];
  for (int i = lane; i < kFragmentPieceColumns; i += kWarp) store(y + i, p.scale * wanted[i]);
}

}  // namespace

cudaError_t launch_unpack_blocks(const FragmentLayout& layout, const void* weight, void* y, int64_t rows, int64_t in,
                                 cudaStream_t stream) {
  if (rows == 0 || in == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(in, kFragmentBlockColumns)),
                  static_cast<unsigned>(ceil_div(rows, kFragmentBlockRows)));
  return launch_overlapped(unpack_blocks, grid, kUnpackWarps * kWarp, 0, stream, layout,
                           static_cast<const uint8_t*>(weight), static_cast<__nv_bfloat16*>(y), rows, in);
}

cudaError_t launch_packed_embedding(const EmbeddingParams& p, const FragmentLayout& layout, cudaStream_t stream) {
  if (p.tokens == 0 || p.hidden == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.tokens),
                  static_cast<unsigned>(ceil_div(p.hidden, kUnpackWarps * kFragmentPieceColumns)));
  return with_float_type(p.y_dtype, [&](auto y) {
    return launch_overlapped(gather_packed_rows<decltype(y)>, grid, kUnpackWarps * kWarp, 0, stream, p, layout);
  });
}

}  // namespace eadem::kernels::cuda
