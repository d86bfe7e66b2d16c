// SPDX-License-Identifier: Apache-2.0
//
// Small copies between the device and page-locked memory of the host, made by a kernel. A copy engine is a unit of its
// own: it begins late after the kernel before the copy, and the kernel after it begins late, too. On an H100 a kernel
// that copies begins some 1 us after the kernel before it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

namespace eadem::kernels::cuda {

inline constexpr int64_t kMostSmallCopyBytes = 64 * 1024;
inline constexpr int kMostSmallCopies = 4;  // of a launch

// One of `to` and `from` may be memory of cudaHostAlloc.
struct SmallCopy {
  void* to;
  const void* from;
  int64_t size_bytes;
};
// Whether launch_small_copies takes it: whole words of four bytes, at most kMostSmallCopyBytes.
[[nodiscard]] inline bool is_small(const SmallCopy& copy) {
  const auto low_bits = reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from);
  return copy.size_bytes <= kMostSmallCopyBytes && low_bits % 4 == 0 && copy.size_bytes % 4 == 0;
}
// Begins when all work before it on the stream has ended, and what comes after it begins when it has ended. At most
// kMostSmallCopies, none of which reads what another writes.
[[nodiscard]] cudaError_t launch_small_copies(std::span<const SmallCopy> copies, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
