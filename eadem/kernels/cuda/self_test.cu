// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/philox.h"
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

// Random signs and mantissas, with exponents from 2^-8 to 2^7, so that terms of different sizes are added and cancel.
__global__ void fill_test_values(void* values, DType dtype, int64_t size, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const auto words = philox4x32(seed, static_cast<uint64_t>(i)).words;
  const float mantissa = 1.0f + uniform_float(words[0]);
  const float value = ldexpf(mantissa, static_cast<int>(words[1] % 16) - 8);
  store_any(values, dtype, i, words[2] % 2 == 0 ? value : -value);
}

__global__ void fill_test_codes(uint8_t* codes, int64_t size, TestCodes range, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const uint32_t word = philox4x32(seed, static_cast<uint64_t>(i)).words[0];
  codes[i] = static_cast<uint8_t>((word >> 8 & 0x80u) | (range.first + word % (range.last - range.first + 1u)));
}

__global__ void count_unequal(const uint16_t* a, const uint16_t* b, int64_t size, uint32_t* count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size && a[i] != b[i]) atomicAdd(count, 1u);
}

unsigned num_blocks(int64_t size) { return static_cast<unsigned>(ceil_div(size, kThreads)); }

}  // namespace

cudaError_t launch_fill_test_values(void* values, DType dtype, int64_t size, uint64_t seed, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  fill_test_values<<<num_blocks(size), kThreads, 0, stream>>>(values, dtype, size, seed);
  return cudaGetLastError();
}

cudaError_t launch_fill_test_codes(uint8_t* codes, int64_t size, TestCodes range, uint64_t seed, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  fill_test_codes<<<num_blocks(size), kThreads, 0, stream>>>(codes, size, range, seed);
  return cudaGetLastError();
}

cudaError_t launch_count_unequal(const void* a, const void* b, int64_t size_bytes, uint32_t* count,
                                 cudaStream_t stream) {
  if (size_bytes == 0) return cudaSuccess;
  count_unequal<<<num_blocks(size_bytes / 2), kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), size_bytes / 2, count);
  return cudaGetLastError();
}

}  // namespace eadem::kernels::cuda
