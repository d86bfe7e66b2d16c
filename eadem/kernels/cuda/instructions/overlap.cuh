// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch: a kernel launched with `launch_overlapped` may begin before the previous
// kernel of its stream has ended. Every block must call `wait_for_earlier_kernels` before it reads memory that an
// earlier kernel of the same step writes, or writes memory that an earlier kernel reads. What earlier steps wrote, and
// what the host copied for this one, may be read without waiting: that copy begins after all kernels before it, and
// every kernel after it begins when it is complete.
//
// Code for less than 9.0 has neither this nor clusters: kernels begin one after another, and the functions for the
// device do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next kernel to begin as multiprocessors become free.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the code for the current device has clusters and programmatic dependent launch.
inline bool has_clusters() {
  constexpr int kLeast = 90;
  int capability = 0;
  return find_code_capability(capability) == cudaSuccess && capability >= kLeast;
}

// Launches a kernel in clusters of `cluster` blocks, with `shared_bytes` of dynamic shared memory. With static arrays
// of up to 16 KB, that may exceed the default limit of 48 KB. More than one block needs has_clusters().
template <typename... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), unsigned cluster, dim3 grid, unsigned threads,
                            size_t shared_bytes, cudaStream_t stream, const Params&... params) {
  if (shared_bytes > 32 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  const bool overlaps = has_clusters();
  if (cluster > 1 && !overlaps) return cudaErrorNotSupported;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !overlaps ? 0 : cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <typename... Params>
cudaError_t launch_overlapped(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes,
                              cudaStream_t stream, const Params&... params) {
  return launch_clusters(kernel, 1, grid, threads, shared_bytes, stream, params...);
}

}  // namespace eadem::kernels::cuda
