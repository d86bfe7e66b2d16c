// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/small_copy.h"

#include <algorithm>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

struct Copies {
  SmallCopy of[kMostSmallCopies];
};

// It does not call allow_next_kernel, so that the next kernel begins after all words are written, and may read them
// without wait_for_earlier_kernels.
__global__ void __launch_bounds__(kThreads) small_copies(const __grid_constant__ Copies copies) {
  const SmallCopy& copy = copies.of[blockIdx.y];
  wait_for_earlier_kernels();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < copy.size_bytes / 4) static_cast<uint32_t*>(copy.to)[i] = __ldcv(static_cast<const uint32_t*>(copy.from) + i);
  __threadfence_system();
}

}  // namespace

cudaError_t launch_small_copies(std::span<const SmallCopy> copies, cudaStream_t stream) {
  if (copies.size() > kMostSmallCopies || !std::ranges::all_of(copies, is_small)) return cudaErrorInvalidValue;
  Copies params{};
  std::ranges::copy(copies, params.of);
  int64_t most = 0;
  for (const SmallCopy& copy : copies) most = std::max(most, copy.size_bytes);
  if (most == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(most / 4, kThreads)), static_cast<unsigned>(copies.size()));
  return launch_overlapped(small_copies, grid, kThreads, 0, stream, params);
}

}  // namespace eadem::kernels::cuda
