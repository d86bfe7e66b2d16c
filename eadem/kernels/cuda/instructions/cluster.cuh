// SPDX-License-Identifier: Apache-2.0
//
// Reductions over a cluster: blocks that run at the same time and can write each other's shared memory. Code for less
// than 9.0 has no clusters; there a block is one by itself, and what is launched has no others.
#pragma once

#include <cstdint>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/mma.cuh"

namespace eadem::kernels::cuda {

// Whether this code has clusters; only device code may ask.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;

__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_sync() { __syncthreads(); }
__device__ inline void store_to_block(uint64_t* to, int, uint64_t value) { *to = value; }
#else
inline constexpr bool kHasClusters = true;

__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// All threads of all blocks wait for each other; what they wrote, also to global memory, is visible to the others then.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address, in the cluster, of what stands at `address` of shared memory in block `rank`.
__device__ inline uint32_t address_in_block(uint32_t address, int rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
// Arrives, where `wanted`, at a barrier by such an address, as arrive_at_block. There is no branch: ptxas takes one for
// the end of what it knows of products that run.
__device__ inline void arrive_in_cluster(uint32_t barrier, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %1, 0;\n"
      "@wanted mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(wanted))
      : "memory");
}
// Arrives at the barrier of block `rank` that stands where this block's barrier `barrier` does. It orders reads, but
// what this block wrote may not be visible to the other one.
__device__ inline void arrive_at_block(uint32_t barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Writes `value` to `*to` in the shared memory of block `rank`; `to` is this block's address of the variable.
__device__ inline void store_to_block(uint64_t* to, int rank, uint64_t value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u64 [remote], %2;\n"
      "}\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "r"(rank), "l"(value)
      : "memory");
}
#endif

__device__ inline uint64_t bits_of(uint64_t value) { return value; }
__device__ inline uint64_t bits_of(double value) { return static_cast<uint64_t>(__double_as_longlong(value)); }
template <typename T>
__device__ T from_bits(uint64_t bits);
template <>
__device__ inline uint64_t from_bits<uint64_t>(uint64_t bits) {
  return bits;
}
template <>
__device__ inline double from_bits<double>(uint64_t bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}

// Reduces over the threads of a cluster of kBlocks blocks; every thread gets the result. Blocks are combined in order
// of their ranks. One object serves all reductions of a kernel; it is made by all threads.
template <int kBlocks>
class ClusterReduction {
 public:
  // `slots`: shared memory, [2][kBlocks].
  __device__ explicit ClusterReduction(uint64_t (&slots)[2][kBlocks]) : slots_(slots) {}

  template <typename T, typename Combine>
  __device__ T reduce(T value, T identity, Combine combine) {
    value = block_reduce(value, identity, combine);
    uint64_t* now = slots_[turn_];
    if (threadIdx.x < kBlocks) store_to_block(now + cluster_rank(), static_cast<int>(threadIdx.x), bits_of(value));
    cluster_sync();
    // The other turn's slots are written next. When they come back to these, all threads have passed its barrier.
    turn_ ^= 1;
    T result = from_bits<T>(now[0]);
#pragma unroll
    for (int rank = 1; rank < kBlocks; ++rank) result = combine(result, from_bits<T>(now[rank]));
    return result;
  }
  __device__ uint64_t sum(uint64_t value) { return reduce(value, uint64_t{0}, Sum{}); }
  __device__ double sum(double value) { return reduce(value, 0.0, Sum{}); }
  __device__ uint64_t max(uint64_t value) { return reduce(value, uint64_t{0}, Max{}); }

 private:
  uint64_t (&slots_)[2][kBlocks];
  int turn_ = 0;
};

}  // namespace eadem::kernels::cuda
