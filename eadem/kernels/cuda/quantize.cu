// SPDX-License-Identifier: Apache-2.0
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
template <typename T, int kVectors, int kBlocks>
__global__ void __launch_bounds__(kThreads<kBlocks>) quantize_row(QuantizeRowsParams p) {
  constexpr int kStride = cuda::kStride<kBlocks>;
  __shared__ uint64_t slots[2][kBlocks];
  const int64_t row = blockIdx.x / kBlocks, offset = row * p.columns;
  const T* x = static_cast<const T*>(p.x) + offset;
  uint8_t* codes = p.codes + offset;
  const int block = kBlocks > 1 ? cluster_rank() : 0;
  const int64_t first = (block * kThreads<kBlocks> + static_cast<int>(threadIdx.x)) * kWidth;
  float values[kVectors > 0 ? kVectors : 1][kWidth];
  uint32_t largest = 0;
  allow_next_kernel();
  if constexpr (kBlocks > 1) cluster_sync();  // no block may be written to before it has begun
  wait_for_earlier_kernels();
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) {
        load_vector(values[v], x + first + v * kStride);
        largest = largest_magnitude(largest, values[v]);
      }
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_vector(values[0], x + i);
      largest = largest_magnitude(largest, values[0]);
    }
  }
  if constexpr (kBlocks > 1)
    largest = static_cast<uint32_t>(ClusterReduction<kBlocks>(slots).max(uint64_t{largest}));
  else
    largest = block_max(largest);
  const float scale = e4m3_scale_of(largest);
  const Divisor divided(scale);
  if (block == 0 && threadIdx.x == 0) p.scales[row] = scale;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) store_codes(codes + first + v * kStride, values[v], divided);
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_vector(values[0], x + i);
      store_codes(codes + i, values[0], divided);
    }
  }
}

template <typename T, int kVectors, int kBlocks>
cudaError_t launch_row(const QuantizeRowsParams& p, cudaStream_t stream) {
  return launch_clusters(quantize_row<T, kVectors, kBlocks>, kBlocks, dim3(static_cast<unsigned>(p.rows * kBlocks)),
                         kThreads<kBlocks>, 0, stream, p);
}

// Many rows: a block has one, and a thread keeps its vectors as they are in memory; all its loads come first.
constexpr int kFewRows = 256, kManyThreads = 256, kManyStride = kManyThreads * kWidth, kMostVectors = 8;

template <typename T, int kVectors>
__global__ void __launch_bounds__(kManyThreads) quantize_many_rows(QuantizeRowsParams p) {
  const int64_t row = blockIdx.x, offset = row * p.columns;
  const int first = static_cast<int>(threadIdx.x) * kWidth, columns = static_cast<int>(p.columns);
  const T* x = static_cast<const T*>(p.x) + offset;
  Vector<T, kWidth> kept[kVectors];
  allow_next_kernel();
  wait_for_earlier_kernels();
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (first + v * kManyStride < columns) kept[v] = vector_at<T, kWidth>(x + first + v * kManyStride);
  float values[kWidth];
  uint32_t largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (first + v * kManyStride < columns) {
      widen(values, kept[v]);
      largest = largest_magnitude(largest, values);
    }
  const float scale = e4m3_scale(largest);
  const Divisor divided(scale);
  if (threadIdx.x == 0) p.scales[row] = scale;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (first + v * kManyStride < columns) {
      widen(values, kept[v]);
      store_codes(p.codes + offset + first + v * kManyStride, values, divided);
    }
}

// A thread keeps as many vectors as a row has for it.
template <typename T, int kVectors = 1>
cudaError_t launch_many_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  if constexpr (kVectors < kMostVectors)
    if (p.columns > kVectors * kManyStride) return launch_many_rows<T, 2 * kVectors>(p, stream);
  return launch_overlapped(quantize_many_rows<T, kVectors>, dim3(static_cast<unsigned>(p.rows)), kManyThreads, 0,
                           stream, p);
}

// A block has a row whose largest magnitude is known. It leaves 0 there, as all kernels do that count.
template <typename T>
__global__ void __launch_bounds__(kManyThreads) quantize_known_rows(QuantizeRowsParams p) {
  const int64_t row = blockIdx.x, offset = row * p.columns;
  allow_next_kernel();
  wait_for_earlier_kernels();
  const float scale = e4m3_scale_of(p.largest[row]);
  const Divisor divided(scale);
#pragma unroll 4
  for (int64_t i = int64_t{threadIdx.x} * kWidth; i < p.columns; i += kManyStride) {
    float values[kWidth];
    load_vector(values, static_cast<const T*>(p.x) + offset + i);
    store_codes(p.codes + offset + i, values, divided);
  }
  __syncthreads();  // all have read it
  if (threadIdx.x != 0) return;
  p.scales[row] = scale;
  p.largest[row] = 0;
}

}  // namespace

cudaError_t launch_quantize_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns % kWidth != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    if (p.largest != nullptr)
      return launch_overlapped(quantize_known_rows<T>, dim3(static_cast<unsigned>(p.rows)), kManyThreads, 0, stream, p);
    if (p.rows > kFewRows && p.columns <= kMostVectors * kManyStride) return launch_many_rows<T>(p, stream);
    constexpr int64_t kRowsOfClusters = 16;
    if (p.columns <= kStride<1>) return launch_row<T, 1, 1>(p, stream);
    if (p.rows <= kRowsOfClusters && p.columns <= 2 * kStride<kCluster> && has_clusters())
      return launch_row<T, 2, kCluster>(p, stream);
    if (p.columns <= 4 * kStride<1>) return launch_row<T, 4, 1>(p, stream);
    return launch_row<T, 0, 1>(p, stream);
  });
}

}  // namespace eadem::kernels::cuda
