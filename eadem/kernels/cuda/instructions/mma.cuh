// SPDX-License-Identifier: Apache-2.0
//
// Helpers of the tensor-core kernels: fragments of mma.sync, asynchronous copies from global to shared memory, and
// barriers that wait for the copies.
//
// Fragments, for lane = 4 * g + t of a warp (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   a  16 x 16, row-major   a[0] row g, columns 2t and 2t + 1;  a[1] row g + 8;  a[2], a[3] the same, columns + 8
//   b  16 x 8, column n     b[0] rows 2t and 2t + 1 of column g;  b[1] rows + 8
//   c  16 x 8, f32          c[0], c[1] row g, columns 2t and 2t + 1;  c[2], c[3] row g + 8
// Two bf16 values share a register, the lower index in the lower half.
//
// One mma.sync m16n8k16 adds 16 products to an accumulator as one sum. On Hopper, a chain of them over ascending k has
// the bits of wgmma and of cuBLASLt without split-K. The bits do not depend on which row of a fragment a token
// occupies.
#pragma once

#include <cstdint>

#include "eadem/kernels/cuda/device_math.cuh"

namespace eadem::kernels::cuda {

// The volatile move keeps the compiler from recomputing the address at every use.
__device__ inline uint32_t shared_address(const void* p) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("mov.u32 %0, %0;" : "+r"(address));
  return address;
}

// --- Fragments.

// Loads four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8, aligned to 16
// bytes.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Stores what load_matrices loads (sm_90).
__device__ inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

// Transposes an 8 x 8 matrix of 16-bit elements: lane l holds elements 2 (l % 4) and the next of row l / 4.
__device__ inline uint32_t transposed(uint32_t elements) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(elements));
  return result;
}

// Loads 16 bytes.
__device__ inline void load_16(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void store_16(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ inline void store_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ inline float load_f32(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline void store_f32(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Stores four values.
__device__ inline void store_f32x4(uint32_t address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
// Loads two values.
__device__ inline float2 load_f32x2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

// c += a b
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Copies of 16 bytes by one thread (sm_80). If not `wanted`, nothing is read and zeros are written.

__device__ inline void copy_16_async(uint32_t shared, const void* global, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// The same for 4 bytes.
__device__ inline void copy_4_async(uint32_t shared, const void* global, bool wanted) {
  const int bytes = wanted ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest `kPending` groups of this thread's copies have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- Barriers of a block by number, 1 to 15, for `threads` of its threads, of which some may only arrive.

__device__ inline void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// --- Barriers in shared memory (sm_90), by address. A phase ends when `arrivals` threads have arrived.

constexpr uint32_t kBarrierBytes = 8;

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the barriers that this thread has initialized known to copies.
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Counts as `arrivals` threads.
__device__ inline void barrier_arrive(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Waits for the end of the phase with this parity; the first phase has parity 0. The thread sleeps until then, so that
// it takes no turns of others; the hint, in nanoseconds, is for how long at most before it looks again.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kSleep = 10'000'000;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(barrier),
      "r"(parity), "r"(kSleep)
      : "memory");
}
// Arrives once all earlier 16-byte copies of this thread have completed; counts as one of the barrier's `arrivals`.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` bytes of bulk copies too.
__device__ inline void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// How the L2 cache treats lines: weights, which are read once, are evicted first; activations, which every block reads,
// last.
enum class L2Policy : uint8_t { evict_first, evict_last };
template <L2Policy kPolicy>
__device__ inline uint64_t l2_policy() {
  uint64_t policy;
  if constexpr (kPolicy == L2Policy::evict_first)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// One thread copies `bytes` bytes, a multiple of 16, between addresses aligned to 16; `barrier` counts them.
__device__ inline void copy_bulk_async(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                       uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

#endif

}  // namespace eadem::kernels::cuda
