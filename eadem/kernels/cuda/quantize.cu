// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/fp8_rows.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kWidth = 8;  // values of a vector

// Threads of a block, and vectors that one keeps in registers: two inputs need more of those.
template <bool kGated>
struct Block {
  static constexpr int kWarps = kGated ? 16 : 8, kVectors = kGated ? 4 : 8;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int64_t kWarpColumns = kVectors * kWarp * kWidth;  // of a row that one warp keeps
};

// Eight neighbouring values as they are in memory.
template <typename T>
struct alignas(sizeof(T) * kWidth < kVectorAlignment ? sizeof(T) * kWidth : kVectorAlignment) RawVector {
  T elements[kWidth];
};

// kRowWarps warps have a row. A thread keeps its vectors in registers, or, where rows are longer, reads them twice.
template <typename T, int kRowWarps, bool kKeeps, bool kGated>
__global__ void __launch_bounds__(Block<kGated>::kThreads) quantize_rows(QuantizeRowsParams p) {
  constexpr int kWarps = Block<kGated>::kWarps, kVectors = Block<kGated>::kVectors;
  constexpr int kStride = kRowWarps * kWarp * kWidth;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t row = int64_t{blockIdx.x} * (kWarps / kRowWarps) + warp / kRowWarps, offset = row * p.columns;
  const bool exists = row < p.rows;
  const int64_t first = exists ? threadIdx.x % (kRowWarps * kWarp) * kWidth : p.columns;
  const T* x = static_cast<const T*>(p.x) + offset;
  const T* factor = static_cast<const T*>(p.factor) + offset;  // with kGated
  RawVector<T> kept[kKeeps ? kVectors : 1];
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
  wait_for_earlier_kernels();
  float values[kWidth];
  uint64_t largest = 0;
  if constexpr (kKeeps) {
    if constexpr (!kGated) {  // all loads first
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (first + v * kStride < p.columns) kept[v] = *reinterpret_cast<const RawVector<T>*>(x + first + v * kStride);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) {
        if constexpr (kGated) {
          load_values(values, first + v * kStride);
          store_vector(kept[v].elements, values);
        } else {
          load_vector(values, kept[v].elements);
        }
        largest = largest_magnitude(largest, values);
      }
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_values(values, i);
      largest = largest_magnitude(largest, values);
    }
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
  if constexpr (kKeeps) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * kStride < p.columns) {
        load_vector(values, kept[v].elements);
        store_codes(codes + first + v * kStride, values, divided);
      }
  } else {
    for (int64_t i = first; i < p.columns; i += kStride) {
      load_values(values, i);
      store_codes(codes + i, values, divided);
    }
  }
}

// The block's warps, halved while what is left of them keeps a row.
template <typename T, bool kGated, int kRowWarps = Block<kGated>::kWarps>
cudaError_t launch_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  constexpr int64_t kColumns = kRowWarps * Block<kGated>::kWarpColumns;
  // Few rows: all warps of a block share one, so that each thread waits for few loads.
  constexpr int64_t kFewRows = 256;
  if constexpr (kRowWarps > 1)
    if (p.columns <= kColumns / 2 && p.rows > kFewRows) return launch_rows<T, kGated, kRowWarps / 2>(p, stream);
  constexpr int kRows = Block<kGated>::kWarps / kRowWarps;
  return launch_overlapped(
      p.columns <= kColumns ? quantize_rows<T, kRowWarps, true, kGated> : quantize_rows<T, kRowWarps, false, kGated>,
      dim3(static_cast<unsigned>(ceil_div(p.rows, int64_t{kRows}))), Block<kGated>::kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_quantize_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns % kWidth != 0) return cudaErrorInvalidValue;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    using T = decltype(x);
    return p.factor == nullptr ? launch_rows<T, false>(p, stream) : launch_rows<T, true>(p, stream);
  });
}

}  // namespace eadem::kernels::cuda
