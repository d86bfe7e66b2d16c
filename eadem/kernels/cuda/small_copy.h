// SPDX-License-Identifier: Apache-2.0
//
// Small copies between the device and page-locked memory of the host, made by a kernel. A copy engine is a unit of its
// own: it begins late after the kernel before the copy, and the kernel after it begins late, too. On an H100 a kernel
// that copies begins some 1 us after the kernel before it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace eadem::kernels::cuda {

inline constexpr int64_t kMostSmallCopyBytes = 64 * 1024;

// Whether launch_small_copy takes these addresses and this size: whole words of four bytes, at most
// kMostSmallCopyBytes.
[[nodiscard]] inline bool is_small_copy(const void* to, const void* from, int64_t size_bytes) {
  const auto low_bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  return size_bytes <= kMostSmallCopyBytes && low_bits % 4 == 0 && size_bytes % 4 == 0;
}
// One of `to` and `from` may be memory of cudaHostAlloc. Begins when all work before it on the stream has ended, and
// what comes after it begins when it has ended.
[[nodiscard]] cudaError_t launch_small_copy(void* to, const void* from, int64_t size_bytes, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
