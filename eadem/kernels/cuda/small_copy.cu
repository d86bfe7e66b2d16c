// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/small_copy.h"

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// It does not call allow_next_kernel, so that the next kernel begins after all words are written, and may read them
// without wait_for_earlier_kernels.
__global__ void __launch_bounds__(kThreads) small_copy(uint32_t* to, const uint32_t* from, int words) {
  wait_for_earlier_kernels();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < words) to[i] = __ldcv(from + i);
  __threadfence_system();
}

}  // namespace

cudaError_t launch_small_copy(void* to, const void* from, int64_t size_bytes, cudaStream_t stream) {
  if (size_bytes == 0) return cudaSuccess;
  if (!is_small_copy(to, from, size_bytes)) return cudaErrorInvalidValue;
  const int words = static_cast<int>(size_bytes / 4);
  return launch_overlapped(small_copy, dim3(static_cast<unsigned>(ceil_div(words, kThreads))), kThreads, 0, stream,
                           static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), words);
}

}  // namespace eadem::kernels::cuda
