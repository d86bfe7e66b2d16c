// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps (sm_90): one thread copies a box of a matrix from global to shared memory. A box has some panels of 64
// columns of bf16, which arrive one after another as wgmma.cuh describes them: rows of 128 bytes, whose pieces of 16
// bytes are permuted so that neither rows nor columns of pieces share banks. One instruction copies all panels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "eadem/kernels/cuda/instructions/wgmma.cuh"

namespace eadem::kernels::cuda {

// The function of the driver that describes tensor maps, or null.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return encode;
}

// Describes boxes of `box_rows` rows and `box_panels` panels of a matrix [rows, columns] of bf16, with columns a
// multiple of 64; what a box has beyond the matrix becomes zeros. `data` and its rows begin at multiples of 16 bytes.
// Thread-safe.
inline cudaError_t make_panel_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows,
                                  int box_panels) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  // The matrix as [panels, rows, 64].
  const cuuint64_t extents[] = {kPanelColumns, static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(columns / kPanelColumns)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns) * 2, kPanelRowBytes};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_panels)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), extents, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Describes boxes of `box_rows` rows and 64 columns, a panel, of a head of a tensor [rows, heads, width] of bf16, with
// a width that is a multiple of 8. What a box has beyond the head's columns becomes zeros, too. As above.
inline cudaError_t make_head_map(CUtensorMap& map, const void* data, int64_t rows, int64_t heads, int64_t width,
                                 int box_rows) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  // The tensor as [heads, rows, width].
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(heads * width) * 2, static_cast<cuuint64_t>(width) * 2};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), extents, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Describes boxes of `box_rows` rows and `box_columns` columns, 64 or 128, of a matrix [rows, columns] of bytes, with
// columns a multiple of 16. A row of a box arrives as wgmma.cuh says, or one of 64 columns with piece i of row r at
// i ^ (r / 2 % 4). As above.
inline cudaError_t make_code_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows,
                                 int box_columns) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), 1};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(columns * rows)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), extents, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Describes boxes of `box_rows` rows and `box_panels` panels of 128 bytes of rows that have `columns` bytes each, from
// `data` on, a multiple of 128 bytes. A box may begin at any byte of a row, and reach into the next one. A panel
// arrives as wgmma.cuh says. As above.
inline cudaError_t make_code_rows_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows,
                                      int box_panels) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  // The bytes as [panels, rows, bytes of a panel], twice as many of the first and last as a row and a panel have.
  const cuuint64_t extents[] = {2 * kPanelRowBytes, static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(2 * columns / kPanelRowBytes)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns), kPanelRowBytes};
  const cuuint32_t box[] = {kPanelRowBytes, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_panels)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), extents, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Brings a map near, so that the first copy by it does not wait for it.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box that begins at a row and a panel to `shared`, a multiple of 1024 bytes; `barrier` counts its bytes,
// also those beyond the matrix.
__device__ inline void copy_box_async(uint32_t shared, const CUtensorMap& map, int row, int panel, uint32_t barrier,
                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(0), "r"(row), "r"(panel), "r"(barrier), "l"(policy)
      : "memory");
}
// Copies the box that begins at an element of a row: of a panel by a map of make_code_rows_map, of a head by one of
// make_head_map.
__device__ inline void copy_columns_async(uint32_t shared, const CUtensorMap& map, int column, int row, int of,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(of), "r"(barrier), "l"(policy)
      : "memory");
}
// The same, and the L2 cache keeps the box as it does other lines.
__device__ inline void copy_columns_async(uint32_t shared, const CUtensorMap& map, int column, int row, int of,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(of), "r"(barrier)
      : "memory");
}
// As the first, and the L2 cache keeps the box as it does other lines.
__device__ inline void copy_box_async(uint32_t shared, const CUtensorMap& map, int row, int panel, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared),
      "l"(&map), "r"(0), "r"(row), "r"(panel), "r"(barrier)
      : "memory");
}
// As the first, for every block of the cluster whose bit in `blocks` is set: the box arrives at the same place of its
// shared memory, and its barrier at that place counts the bytes.
__device__ inline void copy_box_to_blocks_async(uint32_t shared, const CUtensorMap& map, int row, int panel,
                                                uint32_t barrier, int blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared),
      "l"(&map), "r"(0), "r"(row), "r"(panel), "r"(barrier), "h"(static_cast<uint16_t>(blocks)), "l"(policy)
      : "memory");
}

}  // namespace eadem::kernels::cuda
