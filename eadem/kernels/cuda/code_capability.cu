// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

// Every generic source is compiled for the same architectures, so that the code of this kernel tells those of all.
__global__ void probe() {}

}  // namespace

cudaError_t find_code_capability(int& capability) {
  constexpr int kMostDevices = 64;  // whose answer is kept
  static std::atomic<int> known[kMostDevices];
  capability = 0;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kMostDevices && (capability = known[device].load(std::memory_order_relaxed)) > 0) return cudaSuccess;
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clears it
    return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ? cudaSuccess : error;
  }
  capability = attributes.ptxVersion;
  if (device < kMostDevices) known[device].store(capability, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace eadem::kernels::cuda
