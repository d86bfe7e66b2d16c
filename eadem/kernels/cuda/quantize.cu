// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/cluster.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWidth = 8;  // values of a vector
template <int kBlocks>
constexpr int kThreads = kBlocks > 1 ? 256 : 512;
template <int kBlocks>
constexpr int kStride = kBlocks* kThreads<kBlocks>* kWidth;
constexpr int kCluster = 8;

// kBlocks blocks, a cluster, have a row, which is the fastest for few where there are clusters. A thread keeps its
// kVectors vectors in registers; with kVectors = 0 it reads them twice.
template <typename T, int kVectors, bool kGated, int kBlocks>
__global__ void __launch_bounds__(kThreads<kBlocks>) quantize_row(QuantizeRowsParams p) {
  constexpr int kStride = cuda::kStride<kBlocks>;
  __shared__ uint64_t slots[2][kBlocks];
  const int64_t row = blockIdx.x / kBlocks, offset = row * p.columns;
  const T* x = static_cast<const T*>(p.x) + offset;
  const T* factor = static_cast<const T*>(p.factor) + offset;  // with kGated
  uint8_t* codes = p.codes + offset;
  const int block = kBlocks > 1 ? cluster_rank() : 0;
  const int64_t first = (block * kThreads<kBlocks> + static_cast<int>(threadIdx.x)) * kWidth;
  float values[kVectors > 0 ? kVectors : 1][kWidth];
  uint64_t largest = 0;
  const auto load_values = [&](float(&vector)[kWidth], int64_t i) {
    load_vector(vector, x + i);
    if constexpr (kGated) {
      float factors[kWidth];
      load_vector(factors, factor + i);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) vector[n] = rounded<T>(activate(p.activation, vector[n]) * factors[n]);
    }
  };
  allow_next_kernel();
  if constexpr (kBlocks > 1) cluster_sync();  // no block may be written to before it has begun
  wait_for_earlier_kernels();
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) {
        load_values(values[v], first + v * kStride);
        largest = largest_magnitude(largest, values[v]);
      }
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_values(values[0], i);
      largest = largest_magnitude(largest, values[0]);
    }
  }
  if constexpr (kBlocks > 1)
    largest = ClusterReduction<kBlocks>(slots).max(largest);
  else
    largest = block_max(largest);
  const float scale = e4m3_scale_of(static_cast<uint32_t>(largest));
  if (block == 0 && threadIdx.x == 0) p.scales[row] = scale;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) store_codes(codes + first + v * kStride, values[v], scale);
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_values(values[0], i);
      store_codes(codes + i, values[0], scale);
    }
  }
}

template <typename T, int kVectors, int kBlocks>
cudaError_t launch_row(const QuantizeRowsParams& p, cudaStream_t stream) {
  return launch_clusters(
      p.factor == nullptr ? quantize_row<T, kVectors, false, kBlocks> : quantize_row<T, kVectors, true, kBlocks>,
      kBlocks, dim3(static_cast<unsigned>(p.rows * kBlocks)), kThreads<kBlocks>, 0, stream, p);
}

// Many rows: one to eight warps have one, and a thread keeps its vectors in registers; all its loads come first.
constexpr int kWarps = 8, kVectors = 8;
constexpr int64_t kWarpColumns = kVectors * kWarp * kWidth;  // of a row that one warp keeps

// Eight neighbouring values as they are in memory.
template <typename T>
struct alignas(sizeof(T) * kWidth < kVectorAlignment ? sizeof(T) * kWidth : kVectorAlignment) RawVector {
  T elements[kWidth];
};

template <typename T, int kRowWarps>
__global__ void __launch_bounds__(kWarps* kWarp) quantize_many_rows(QuantizeRowsParams p) {
  constexpr int kRowStride = kRowWarps * kWarp * kWidth;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t row = int64_t{blockIdx.x} * (kWarps / kRowWarps) + warp / kRowWarps, offset = row * p.columns;
  const bool exists = row < p.rows;
  const int64_t first = exists ? threadIdx.x % (kRowWarps * kWarp) * kWidth : p.columns;
  const T* x = static_cast<const T*>(p.x) + offset;
  RawVector<T> kept[kVectors];
  allow_next_kernel();
  wait_for_earlier_kernels();
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (first + v * kRowStride < p.columns)
      kept[v] = *reinterpret_cast<const RawVector<T>*>(x + first + v * kRowStride);
  float values[kWidth];
  uint64_t largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (first + v * kRowStride < p.columns) {
      load_vector(values, kept[v].elements);
      largest = largest_magnitude(largest, values);
    }
  uint32_t most = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(largest));
  if constexpr (kRowWarps > 1) {
    __shared__ uint32_t of_warps[kWarps];
    if (threadIdx.x % kWarp == 0) of_warps[warp] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) most = max(most, of_warps[warp / kRowWarps * kRowWarps + w]);
  }
  const float scale = e4m3_scale_of(most);
  const Divisor divided(scale);
  if (exists && threadIdx.x % (kRowWarps * kWarp) == 0) p.scales[row] = scale;
  uint8_t* codes = p.codes + offset;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (first + v * kRowStride < p.columns) {
      load_vector(values, kept[v].elements);
      store_codes(codes + first + v * kRowStride, values, divided);
    }
}

// As many warps as keep a row.
template <typename T, int kRowWarps = 1>
cudaError_t launch_many_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  if constexpr (kRowWarps < kWarps)
    if (p.columns > kRowWarps * kWarpColumns) return launch_many_rows<T, 2 * kRowWarps>(p, stream);
  const auto blocks = static_cast<unsigned>(ceil_div(p.rows, int64_t{kWarps / kRowWarps}));
  return launch_overlapped(quantize_many_rows<T, kRowWarps>, dim3(blocks), kWarps * kWarp, 0, stream, p);
}

}  // namespace

cudaError_t launch_quantize_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns % kWidth != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    constexpr int64_t kFewRows = 256;
    if (p.rows > kFewRows && p.factor == nullptr && p.columns <= kWarps * kWarpColumns)
      return launch_many_rows<T>(p, stream);
    constexpr int64_t kRowsOfClusters = 16;
    if (p.columns <= kStride<1>) return launch_row<T, 1, 1>(p, stream);
    if (p.rows <= kRowsOfClusters && p.columns <= 2 * kStride<kCluster> && has_clusters())
      return launch_row<T, 2, kCluster>(p, stream);
    if (p.columns <= 4 * kStride<1>) return launch_row<T, 4, 1>(p, stream);
    return launch_row<T, 0, 1>(p, stream);
  });
}

}  // namespace eadem::kernels::cuda
